"""``torch.export``: programs that carry the quantised cache, in a file and in compiled packages. Must not know of kernels."""

from kivi_ops.export.rewrite import rewrite

__all__ = ["rewrite"]
