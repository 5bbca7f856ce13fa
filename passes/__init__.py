"""The graph pass and the ``torch.compile`` backend: update + attention becomes attention + append. Must not know of kernels."""
