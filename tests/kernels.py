"""Whether this installation has compiled kernels for this processor."""

import pytest

from regard.mixers.shared.native import LIBRARY

needs_kernels = pytest.mark.skipif(LIBRARY is None, reason="this installation has no compiled kernels")
