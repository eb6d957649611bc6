"""Speed, memory and cost of mechanisms and whole models, and the statistics that studies and advice share."""
