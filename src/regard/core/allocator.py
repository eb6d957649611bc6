"""The allocator settings of every timing and every worker; without torch, since they are read when a process starts."""

# glibc returns large blocks to the kernel at every free; page faults then take as long as the work
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "4000000000", "MALLOC_TRIM_THRESHOLD_": "8000000000"}
