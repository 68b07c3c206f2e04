"""Products of each head's rows and the head's own matrix, which is some rows of a stored one."""

from pallas_kernels.per_head_matmul.operation import bind
from pallas_kernels.per_head_matmul.reference import HeadRows, HeadsFunction

__all__ = ["HeadRows", "HeadsFunction", "bind"]
