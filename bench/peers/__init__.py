"""What the kernels are measured against: code that a trainer would write without them."""
