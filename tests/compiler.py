"""Whether this machine can compile kernels."""

import os
import shutil

import pytest

COMPILER = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")
