"""The probes: one study for each ability that boards ask for, and the profile of a mechanism over all of them."""
