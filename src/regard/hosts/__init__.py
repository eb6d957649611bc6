"""Old paths of names that moved to the root; the next version removes them."""

import warnings


def register() -> list[str]:
    """`regard.register_timm`."""
    from regard.models.timm_registry import register_timm

    moved("regard.hosts.register", "regard.register_timm")
    return register_timm()


def moved(old: str, new: str) -> None:
    """Warn that a name has moved."""
    warnings.warn(f"{old} is now {new}; the next version removes the old name", DeprecationWarning, stacklevel=3)
