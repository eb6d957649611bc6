"""A model in ONNX against itself; needs onnxscript and onnxruntime, else the test is skipped."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn


def agrees(model: nn.Module, x: Tensor, file: Path) -> None:
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    torch.onnx.export(model, (x,), file, dynamo=True, verbose=False)
    session = runtime.InferenceSession(file)
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(found), model(x), rtol=1e-4, atol=1e-5)
