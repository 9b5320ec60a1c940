"""python -m kimi_k3_fp8"""

from kimi_k3_fp8.cli import main

if __name__ == "__main__":
    main()
