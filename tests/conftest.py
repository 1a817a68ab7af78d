"""What must be so before any test's module is imported: Triton's kernels run in its interpreter, without a GPU."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
