"""What pictures of predictions are drawn with."""

from PIL import ImageFont

from regard.lab.tasks.drawing import font_of


def test_names_of_classes_have_their_letters() -> None:
    font = font_of(14)
    missing = bytes(font.getmask("\U000f0000"))  # a private character, which no font has
    assert all(bytes(font.getmask(letter)) != missing for letter in "grünéßñøÄçšłж")
    default = ImageFont.load_default(size=14)
    assert bytes(default.getmask("ü")) == bytes(default.getmask("\U000f0000"))  # why it is not Pillow's own
