"""A model in ONNX against itself; needs onnxscript and onnxruntime, else the test is skipped."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn


def agrees(model: nn.Module, x: Tensor, file: Path, *others: Tensor) -> None:
    """others: inputs of other batch sizes, for which the batch is left free."""
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    shapes = ({0: torch.export.Dim.DYNAMIC},) if others else None
    torch.onnx.export(model, (x,), file, dynamo=True, dynamic_shapes=shapes, verbose=False)
    session = runtime.InferenceSession(file)
    for given in (x, *others):
        (found,) = session.run(None, {session.get_inputs()[0].name: given.numpy()})
        with torch.no_grad():
            torch.testing.assert_close(torch.from_numpy(found), model(given), rtol=1e-4, atol=1e-5)
