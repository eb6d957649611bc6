"""How a command ends that did not do all of its work."""

WRONG_USE = 2
INTERRUPTED = 130
MESSAGE = "regard: interrupted; finished work is kept"
