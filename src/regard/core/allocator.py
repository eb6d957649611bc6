"""Settings of glibc's allocator for timings and worker processes; no torch, since a process reads them at its start."""

# by default glibc returns large blocks to the kernel at every free; page faults then take as long as the computation
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "4000000000", "MALLOC_TRIM_THRESHOLD_": "8000000000"}
