"""The configurations on which the contract is run: the samples of each mechanism, alone and with projections."""

from regard import MIXERS, PROJECTIONS, MixerConfig, parse


def texts(cls: type[MixerConfig]) -> tuple[str, ...]:
    """The samples of a mechanism as they are spelled."""
    return cls.samples or (f"{cls.__name__}()",)


def samples() -> list[str]:
    """The samples of all mechanisms that the package has."""
    return [text for cls in MIXERS for text in texts(cls)]


def pairs() -> list[str]:
    """Every mechanism on heads with every projection but the linear one and linear keys, which the samples have."""
    found = []
    for cls in MIXERS:
        sample = texts(cls)[0]
        if not hasattr(parse(sample), "projection"):
            continue
        inside = sample.removesuffix(")") + ("" if sample.endswith("()") else ", ")
        for projection in PROJECTIONS:
            if projection.__name__ not in ("LinearQKV", "IdentityQuery"):
                found.append(f"{inside}projection={projection.__name__}())")
    return found
