"""The engine on Triton kernels: on the device where there is one, else in Triton's interpreter, else not at all."""

import os

import torch

if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]
