"""The offline site: `make docs`. Pages of the repository, and pages that are made from code and evidence.

Pages are written below build/site-pages, MkDocs makes build/site from them. Nothing of it is committed.
"""
