"""Labels of the rows that other parts of the probes name. Needs no torch."""

BASELINE, AVERAGE, NONE = "softmax", "uniform average", "w/o"
