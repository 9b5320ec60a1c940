"""The same conversion with this library, as `compare.py` and `full_layer.py` measure it.

Called as `python ours.py JOB ANSWER`: JOB is JSON, ANSWER the file to write the seconds of the call to.
"""

import json
import sys
import time
from pathlib import Path

from kimi_k3_fp8 import Recipe, quantize

job = json.loads(sys.argv[1])
recipe = Recipe(ignore=job["ignore"], block_scales=job["block_scales"])

started = time.perf_counter()
quantize(job["source"], job["save_directory"], recipe, progress=False, **job["options"])
Path(sys.argv[2]).write_text(json.dumps(time.perf_counter() - started))
