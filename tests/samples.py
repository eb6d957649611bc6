"""The configurations on which the contract is run: the samples of each mechanism, alone and with projections."""

from regard import MIXERS, PROJECTIONS, MixerConfig, parse


def texts(cls: type[MixerConfig]) -> tuple[str, ...]:
    """The spelled samples of a mechanism."""
    return cls.samples or (f"{cls.__name__}()",)


def samples() -> list[str]:
    """The samples of all mechanisms that the package has."""
    return [text for cls in MIXERS for text in texts(cls)]


def pairs() -> list[str]:
    """Every mechanism on heads with every projection except LinearQKV and IdentityQuery."""
    spellings = []
    for cls in MIXERS:
        sample = texts(cls)[0]
        if not hasattr(parse(sample), "projection"):
            continue
        start = sample.removesuffix(")") + ("" if sample.endswith("()") else ", ")
        for projection in PROJECTIONS:
            if projection.__name__ not in ("LinearQKV", "IdentityQuery"):
                spellings.append(f"{start}projection={projection.__name__}())")
    return spellings
