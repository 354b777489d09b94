"""Different devices on one host: slower, smaller and further away, by the kernel's own means."""
