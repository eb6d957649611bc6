"""The explorer: a page on which one points at a place of one's own picture and sees where a model looks."""
