"""Numbers: a generated set of English sentences with numbers written out, and their German translations.

"tomorrow the baker will sell four hundred twelve rolls" - "morgen wird der Bäcker vierhundertzwölf Brötchen verkaufen".
To translate them, units and tens change places (einundzwanzig), words are joined, and verbs move to the end.
"""

from regard.images.streams import generator

# fmt: off
_ONES = {
    "en": ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
           "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"],
    "de": ["null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun", "zehn", "elf", "zwölf",
           "dreizehn", "vierzehn", "fünfzehn", "sechzehn", "siebzehn", "achtzehn", "neunzehn"],
}
_TENS = {
    "en": ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"],
    "de": ["zwanzig", "dreißig", "vierzig", "fünfzig", "sechzig", "siebzig", "achtzig", "neunzig"],
}
# fmt: on
_PEOPLE = {
    "the baker": "der Bäcker",
    "the teacher": "die Lehrerin",
    "my brother": "mein Bruder",
    "our neighbour": "unsere Nachbarin",
    "the old farmer": "der alte Bauer",
    "a young doctor": "eine junge Ärztin",
    "the child": "das Kind",
    "his aunt": "seine Tante",
    "the museum": "das Museum",
    "the small school": "die kleine Schule",
}  # fmt: skip
# English present, past and infinitive; German present, participle and infinitive
_VERBS = (
    ("sells", "sold", "sell", "verkauft", "verkauft", "verkaufen"),
    ("buys", "bought", "buy", "kauft", "gekauft", "kaufen"),
    ("counts", "counted", "count", "zählt", "gezählt", "zählen"),
    ("sees", "saw", "see", "sieht", "gesehen", "sehen"),
    ("finds", "found", "find", "findet", "gefunden", "finden"),
    ("needs", "needed", "need", "braucht", "gebraucht", "brauchen"),
    ("brings", "brought", "bring", "bringt", "gebracht", "bringen"),
    ("paints", "painted", "paint", "malt", "gemalt", "malen"),
)
_THINGS = {
    "rolls": "Brötchen", "books": "Bücher", "apples": "Äpfel", "green bottles": "grüne Flaschen", "houses": "Häuser",
    "small boats": "kleine Boote", "letters": "Briefe", "old clocks": "alte Uhren", "trees": "Bäume", "red birds":
    "rote Vögel", "stones": "Steine", "blue cups": "blaue Tassen",
}  # fmt: skip


def english(number: int) -> str:
    """A number of 0 .. 9999 in English words: 2021 is "two thousand twenty-one"."""
    for size, name in ((1000, "thousand"), (100, "hundred")):
        if number >= size:
            rest = f" {english(number % size)}" if number % size else ""
            return f"{english(number // size)} {name}{rest}"
    if number < 20:
        return _ONES["en"][number]
    ten = _TENS["en"][number // 10 - 2]
    return f"{ten}-{_ONES['en'][number % 10]}" if number % 10 else ten


def german(number: int) -> str:
    """A number of 0 .. 9999 in German words: 2021 is "zweitausendeinundzwanzig"."""
    for size, name in ((1000, "tausend"), (100, "hundert")):
        if number >= size:
            return _one(number // size) + name + (german(number % size) if number % size else "")
    if number < 20:
        return _ONES["de"][number]
    ten = _TENS["de"][number // 10 - 2]
    return f"{_one(number % 10)}und{ten}" if number % 10 else ten


def _one(number: int) -> str:
    """A digit before another part of a number: "ein", not "eins"."""
    return "ein" if number == 1 else _ONES["de"][number]


def number_sentences(count: int) -> list[tuple[str, str]]:
    """(English, German) sentences, all different, always the same ones; numbers of 1 to 4 digits are equally common."""
    rng = generator("numbers", "sentences")
    people, things = list(_PEOPLE.items()), list(_THINGS.items())
    sentences: dict[tuple[str, str], None] = {}
    while len(sentences) < count:
        digits = int(rng.integers(1, 5))
        number = int(rng.integers(max(10 ** (digits - 1), 2), 10**digits))
        person, thing = people[rng.integers(len(people))], things[rng.integers(len(things))]
        verb = _VERBS[rng.integers(len(_VERBS))]
        objects = f"{english(number)} {thing[0]}", f"{german(number)} {thing[1]}"
        sentences[_sentence(int(rng.integers(4)), person, verb, objects)] = None
    return list(sentences)


def _sentence(time: int, person: tuple[str, str], verb: tuple[str, ...], objects: tuple[str, str]) -> tuple[str, str]:
    """time: 0 without an adverb, 1 today, 2 yesterday, 3 tomorrow."""
    (they, sie), (some, etwas) = person, objects
    return (
        (f"{they} {verb[0]} {some}", f"{sie} {verb[3]} {etwas}"),
        (f"today {they} {verb[0]} {some}", f"heute {verb[3]} {sie} {etwas}"),
        (f"{they} {verb[1]} {some} yesterday", f"{sie} hat gestern {etwas} {verb[4]}"),
        (f"tomorrow {they} will {verb[2]} {some}", f"morgen wird {sie} {etwas} {verb[5]}"),
    )[time]
