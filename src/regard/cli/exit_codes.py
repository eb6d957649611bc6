"""How an interrupted command ends."""

INTERRUPTED = 130
MESSAGE = "regard: interrupted; finished work is kept"
