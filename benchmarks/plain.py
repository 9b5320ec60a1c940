"""The script of the published model's card, as `compare.py` measures it: on a local folder.

Called as `python plain.py JOB ANSWER`: JOB is JSON, ANSWER the file to write the seconds of the call to.
It differs from the card in its folders, its device, and where power-of-two block scales are asked for.
"""

import json
import sys
import time
from pathlib import Path

from compressed_tensors.entrypoints.convert import CompressedTensorsDequantizer
from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
from llmcompressor import model_free_ptq

job = json.loads(sys.argv[1])
scheme: str | QuantizationScheme = "FP8_BLOCK"
if job["block_scales"] == "power_of_two":
    from kimi_k3_fp8.engine.observer import POWER_OF_TWO

    scheme = preset_name_to_scheme("FP8_BLOCK", ["Linear"])
    scheme.weights.observer = POWER_OF_TWO

started = time.perf_counter()
model_free_ptq(
    model_stub=job["source"],
    save_directory=job["save_directory"],
    scheme=scheme,
    ignore=job["ignore"],
    converter=CompressedTensorsDequantizer(job["source"], ignore=job["ignore"]),
    max_workers=job["max_workers"],
    device=job["device"],
)
Path(sys.argv[2]).write_text(json.dumps(time.perf_counter() - started))
