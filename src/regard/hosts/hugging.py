"""Old path of `regard.save_pretrained` and `regard.from_pretrained`."""

from regard.models.hugging_face import from_pretrained as from_pretrained
from regard.models.hugging_face import save_pretrained as save_pretrained

from . import moved

moved("regard.hosts.hugging", "regard.save_pretrained and regard.from_pretrained")
