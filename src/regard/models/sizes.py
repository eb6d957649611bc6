"""The image size of a host, and its spelling for another size."""

from torch import nn

from regard.core import ConfigError, Extra

from .catalog import default_size
from .create import check_host, parse_host, spell_host


def size_of(host: str, extra: Extra = ()) -> tuple[int, int]:
    """(height, width) of a host's images: its option, its default, or timm's configuration. Raises: ConfigError."""
    name, options = parse_host(host)
    option = options.get("img_size", options.get("size"))
    if option is not None:
        return (option, option) if isinstance(option, int) else (int(option[0]), int(option[1]))
    import timm

    check_host(name, extra)
    default = default_size(name, extra)
    if default is not None:
        return default
    if not timm.is_model(name):
        raise ConfigError(f"the image size of {name} is not known: pass --size (size= in Python)")
    configuration = timm.models.get_pretrained_cfg(name)
    _, height, width = configuration.input_size if configuration is not None else (3, 224, 224)
    return int(height), int(width)


def with_size(host: str, size: tuple[int, int], extra: Extra = ()) -> str:
    """The host's spelling for a size (height, width) of images; unchanged if it has this size. Raises: ConfigError."""
    if size_of(host, extra) == size:
        return host
    name, options = parse_host(host)
    options.pop("size", None)
    return spell_host(name, {**options, "img_size": size})


def default_size_of(network: nn.Module, text: str, extra: Extra = ()) -> tuple[int, int]:
    """`size_of` the host of a network, else of a text; 224x224 where they say nothing."""
    record = network.__dict__.get("regard_host")
    try:
        return size_of(text if record is None else spell_host(*record), extra)
    except ConfigError:
        return 224, 224


def set_size(network: nn.Module, size: tuple[int, int]) -> None:
    """Resize the position embedding for images of (height, width), by timm's `set_input_size` where there is one."""
    resize = getattr(network, "set_input_size", None)
    if callable(resize):
        resize(img_size=size)
