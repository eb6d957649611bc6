"""The keys of varied runs as literals: what is stored under a key must be found after every change of the code.

A key that differs here means that finished runs, and committed evidence, are no longer found. Runs are spelled as in
a store's run.json, so that the place of a class in the package does not matter. `tests/lab/studies/test_studies.py`
compares the keys of all committed evidence.
"""

import hashlib
import io
import json
import struct
import tarfile
import zlib
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regard import parse, spell
from regard.files.records import write_record
from regard.lab import TASKS, Recipe, Run
from regard.lab.studies import load_study
from regard.lab.train.initial_weights import Saved

MODEL = {
    "format": "regard-model",
    "host": "vit_desk(size=8, patch=2, dim=16, depth=2, heads=2, in_chans=1)",
    "swaps": [],
    "sha256": "e56515d1bfab429cbad50f639ed7e97565d5b1e8454be5387fd28c911d0a3dec",
}
"""The description of a saved model: a run that starts from it takes the digest of its weights into its key."""
CANVAS = "Classification(host='vit_desk(size=12, patch=2)', data='digits-canvas', size=(12, 12))"
VIT = "vit_desk(patch=2, dim=32, depth=2, heads=2)"
DETECTOR = "size=(84, 84), width=32, strides=(7, 14), anchor=2.0, proposals=(60, 40), rois=32, head=32"
ALL_OF_RECIPE = (
    "Recipe(epochs=300, batch=1024, accumulate=2, optimizer='lamb', lr=1, betas=(0.9, 0.999), weight_decay=0, "
    "warmup=0.0125, floor=0.01, clip=0.5, smoothing=0.2, mixup=0.8, cutmix=1, augment='timm:rand-m9-mstd0.5-inc1', "
    "ema=0.9999, precision='16-mixed', erasing=0.25, cooldown=0.05, stop_after=150, schedule='poly', power=0.5)"
)
RUNS: dict[str, tuple[str, str]] = {
    # images with one class
    "digits": (
        "7c74b022ff83",
        f"Run(task=Classification(host='{VIT}', data='digits', size=(8, 8)), mixer=Softmax(dwc=3))",
    ),
    "canvas": ("1e9ae843bedd", f"Run(task={CANVAS}, mixer=Softmax(), recipe=Recipe(epochs=120), seed=2)"),
    "without attention": (
        "b14eaadcbe30",
        f"Run(task=Classification(host='{VIT}', data='fashion_mnist', size=(28, 28), init='host', limit=3000, "
        "cut=True, class_weights=(2.0, 0.5)), recipe=Recipe(epochs=90, schedule='step', milestones=(0.3, 0.6)), "
        "removed=True)",
    ),
    "held images": (
        "3ca0d3d0748c",
        "Run(task=Classification(host='xcit_desk', data='cifar10', size=(32, 32), split='held'), seed=11, "
        "mixer=SKA(scale=1.0, init='paper', resize='window', dwc=5, projection=IdentityQuery()), "
        "recipe=Recipe(epochs=10, augment='flip', precision='bf16-mixed'))",
    ),
    # undivided folders: the keys rose when each class came to give a fifth of its images to the test (of_each_class)
    "own photos": (
        "6d0a9c9e5d9c",
        f"Run(task=Classification(host='{VIT}', data='FOLDER/photos', size=(10, 14), val=0.25, val_seed=3, "
        "split='val'), mixer=MiTA(m=(3, 2), k=8, experts=2, duplicates='union', landmarks='dwconv', "
        "windows='partition', dwc=3, gate=True), recipe=Recipe(ema=0.99, augment='none'))",
    ),
    "own photos with a part val": (  # @2: older versions validated on training images
        "9742b85fe220",
        f"Run(task=Classification(host='{VIT}', data='FOLDER/parts', size=(10, 14), val=0.25), mixer=Softmax())",
    ),
    "own photos with an unused part val": (
        "1b324c820d9e",
        f"Run(task=Classification(host='{VIT}', data='FOLDER/parts', size=(10, 14)), mixer=Softmax())",
    ),
    "own photos by their beginnings": (
        "86cbf37f8101",
        f"Run(task=Classification(host='{VIT}', data='FOLDER/photos', size=(14, 14), digest='index', mean=(0.5, 0.5, "
        "0.5), std=(0.2, 0.2, 0.2)), mixer=Softmax(projection=FSNE(code=16, width='matched', init='kaiming', "
        "tied=False)))",
    ),
    "own shards": (
        "042ab234c71b",
        f"Run(task=Classification(host='{VIT}', data='stream:FOLDER/shards', size=(8, 8)), mixer=NSA(block=4, k=2, "
        "window=5, group=2), recipe=Recipe(epochs=2, accumulate=4))",
    ),
    # what a run starts from, and learns from
    "start and teacher": (
        "2a97814b18cb",
        f"Run(task={CANVAS.replace('digits-canvas', 'digits')}, mixer=Agent(m=4, bias=True), start=Run(task={CANVAS}, "
        "mixer=XCA(projection=PSNE(init='svd'), decay_temperature=True), recipe=Recipe(epochs=3), seed=1), "
        f"teacher=Run(task={CANVAS}, removed=True, seed=4))",
    ),
    "saved start": (
        "94b084581475",
        f"Run(task={CANVAS}, mixer=Softmax(gate=True), start=Saved('FOLDER/saved'), seed=1)",
    ),
    "pretrained teacher, all of a recipe": (
        "f2b001ad7692",
        "Run(task=Classification(host='deit_tiny_patch16_224(drop_path_rate=0.1, img_size=(192, 256))', "
        "data='imagenet', size=(192, 256), classes=1000, init='host'), mixer=Window(size=(2, 4), shift=(1, 2), "
        f"table=False), recipe={ALL_OF_RECIPE}, teacher='regnety_160(pretrained=True)')",
    ),
    "plan of layers": (
        "18406afaa898",
        f"Run(task={CANVAS}, plan='blocks.0.attn=SKA(); blocks.[1-2].attn=MiTA(m=4, k=4); blocks.3.attn=None')",
    ),
    # a class for each pixel, or for each cell
    "pixels": (
        "e47ab16440d8",
        "Run(task=Segmentation(host='vit_desk(patch=7, dim=64)', data='cued-random', size=(84, 84), "
        "head='cbt(heads=2)', limit=64), mixer=CSKA(kernel=5, rows='centre', cols='conv', bias=False, "
        "activation='gelu'), recipe=Recipe(epochs=1, batch=8, smoothing=0, augment='none'))",
    ),
    "own masks": (
        "885bee84d295",
        "Run(task=Segmentation(host='attended_resnet18(channels=(8, 8, 16, 16), output_stride=8)', "
        "data='FOLDER/streets', size=(16, 24), head='conv(attention=True)', shorter=20, stride=0.5, scales=(1.0, 2.0), "
        "void=0, val=0.5), mixer=Factors(terms='0110', scale=None, window=3, query_stride=2), "
        "recipe=Recipe(augment='scale', smoothing=0.0, schedule='poly', power=1))",
    ),
    "boards": (
        "d62659d7f6a6",
        "Run(task=Cells(host='vit_desk(patch=14)', data='boards(noise=0, ability=hops, pairs=8)'), mixer=Conv(), "
        "recipe=Recipe(augment='none', warmup=0.2))",
    ),
    "large boards of digits": (
        "1f5eb132bcef",
        "Run(task=Cells(host='vit_desk(patch=14)', data='digit_boards(ability=count, side=8, pairs=12)', val=0.1, "
        "split='val'), mixer=DeformableConv(), recipe=Recipe(augment='none', smoothing=0.0))",
    ),
    # objects
    "boxes": (
        "6a143ccd3657",
        f"Run(task=Detection(host='vit_desk(patch=7)', data='cued-class', {DETECTOR}, detector='cascade', "
        "split='test', limit=16), mixer=DynamicConv(kernel=5, glu=False), recipe=Recipe(epochs=1, batch=8, "
        "augment='none', smoothing=0.0))",
    ),
    "own objects with masks": (
        "0780da69676b",
        f"Run(task=Instances(host='vit_desk(patch=7)', data='FOLDER/objects', {DETECTOR}, resize='sides', "
        "scales=(0.5, 1.0), detections=7, corrupt='skip', mask_head=(16, 1)), mixer=BRA(regions=(3, 3), k=2), "
        "recipe=Recipe(augment='flips', smoothing=0.0, lr=1e-4))",
    ),
    "own objects, one of them clipped": (  # @2: older versions left it out
        "f8c41a2d066d",
        f"Run(task=Detection(host='vit_desk(patch=7)', data='FOLDER/clipped', {DETECTOR}, corrupt='skip'), "
        "mixer=Softmax(), recipe=Recipe(augment='none', smoothing=0.0))",
    ),
    "own objects without a split": (  # by_name: older versions divided them by a permutation
        "e73f96bb1992",
        f"Run(task=Detection(host='vit_desk(patch=7)', data='FOLDER/whole', {DETECTOR}), mixer=Softmax(), "
        "recipe=Recipe(augment='none', smoothing=0.0))",
    ),
    "own objects of YOLO, one class of them `no`": (  # @3: older versions called it False
        "349548001130",
        f"Run(task=Detection(host='vit_desk(patch=7)', data='FOLDER/yolo', {DETECTOR}), mixer=Softmax(), "
        "recipe=Recipe(augment='none', smoothing=0.0))",
    ),
    "own photos of a list beside class folders": (  # older versions read the folders alone
        "9dd64a1151b3",
        f"Run(task=Classification(host='{VIT}', data='FOLDER/listed', size=(10, 14)), mixer=Softmax())",
    ),
    # texts and other sequences
    "numbers in words": (
        "5ee79b9b768c",
        "Run(task=Translation(host='translator(dim=16, depth=1, hidden=32)', data='numbers', vocabulary=300, "
        "place='cross', beam=1, penalty=1), mixer=Factors('0110', preset='transformer_xl', axes=1, scale=None), "
        "recipe=Recipe(augment='none', optimizer='adam', schedule='rsqrt', average=2))",
    ),
    "own texts, a bias of the kernels": (
        "0982c194aa07",
        "Run(task=Translation(host='translator(drop=0.2)', data='FOLDER/texts', source='de', target='en', longest=40), "
        "mixer=DynamicConv(kernel=3, axes=1, causal=True, kernel_bias=True), recipe=Recipe(augment='none'))",
    ),
    "lists of operations": (
        "12266326237a",
        "Run(task=Sequences(host='sequence_encoder(dim=16, pool=\"padded_mean\")', data='listops-mini', limit=96), "
        "mixer=Linformer(m=16), recipe=Recipe(augment='none', schedule='linear'))",
    ),
    "paths": (
        "827f2ef42d5a",
        "Run(task=Sequences(host='sequence_encoder', data='pathfinder-9', tested=1000, mask=False), mixer=MiTA(m=25, "
        "k=50, branches='route', landmarks='avg1d'), recipe=Recipe(augment='none', lr=1e-3))",
    ),
    "pixels of digits": (
        "5bed99e33534",
        "Run(task=Sequences(host='sequence_encoder', data='digits', length=64, split='held', val=0.1), "
        "mixer=Performer(), recipe=Recipe(augment='none'))",
    ),
    "own reviews": (
        "f53b9e248a97",
        "Run(task=Sequences(host='sequence_encoder(grams=5, merge=4)', data='FOLDER/reviews'), mixer=TopK(k=5, "
        "indexer='spark', rank=3), recipe=Recipe(augment='none'))",
    ),
    "own pairs of texts": (
        "80dd5e96b514",
        "Run(task=Sequences(host='sequence_encoder', data='FOLDER/pairs.tsv', length=100), mixer=PVT(ratio=2), "
        "recipe=Recipe(augment='none', precision='64-true'))",
    ),
}
"""name -> (key, run). FOLDER has the data of `write_data`."""

# four rows of paper scale have new keys since each published weight is named with its tag
ROWS: dict[tuple[str, str, str, int], str] = {
    ("quickstart", "desk", "MiTA", 0): "4489be1cf4ab",
    ("probes_count", "desk", "w/o", 3): "08843d976e38",
    ("probes_count", "desk", "DynamicConv", 0): "a97c46b4ab65",
    ("mita_growth", "desk", "0000", 1): "9a7bb260ad41",
    ("mita_table2", "paper", "MiTA + DWC + gate, S", 0): "59e370a5bf08",
    ("mita_table4", "paper", "ViT-T CBT", 0): "f59f10fb1aec",
    ("mita_table5_text", "paper", "Linformer", 2): "5ec202af7464",
    ("mita_table7", "desk", "Agent 16", 0): "169514b150c3",
    ("esa_table2", "desk", "1101", 1): "dd4c89c1abc4",
    ("esa_fig3_detection", "paper", "1101", 0): "d9b93b0f0727",
    ("esa_placement", "desk", "1111 in conv4", 0): "958d0e7adb44",
    ("esa_table3_translation", "paper", "0100 in 19", 0): "44aa31d58c05",
    ("ska_table3", "paper", "Swin-T", 0): "15c216700958",
    ("ska_table5", "paper", "C, C, SKA, A", 0): "80f2d49cb321",
    ("sne_table3", "desk", "P-SNE", 0): "442cd9b62664",
    ("sne_table3", "paper", "F-SNE 64", 0): "14155eb8032a",
    ("sne_table4", "paper", "T12 F-SNE 64, STL-10", 0): "c5f92f28bed7",
}
"""(study, scale, row, seed) -> key."""

PLAIN: dict[tuple[str, str], str] = {
    ("classification", "digits"): "95efa55a9b9b",
    ("classification", "cifar10"): "ae59a76252f7",
    ("classification", "imagenet"): "f795589aef7f",
    ("detection", "cued"): "e122cc0b18ad",
    ("detection", "bccd"): "e8a6798a2d42",
    ("instances", "nuclei"): "ff3f89a99e7d",
    ("segmentation", "cued-digits"): "6886c96990d2",
    ("segmentation", "camvid"): "5ea929a6996d",
    ("translation", "numbers"): "2f6195c2b156",
    ("translation", "multi30k"): "7afe45302d83",
    ("sequences", "listops-mini"): "0899c5fb26a0",
    ("sequences", "imdb"): "51e1d27bde4c",
    ("cells", "boards(ability=offset)"): "e2ff3206f5c0",
}
"""(task, data) -> key of the run that the command line makes of them without other options."""

FOLDERS: dict[str, tuple[str, str, str, str]] = {
    "cifar10": (
        "57ed48eca0d7",
        "Classification(host='vit_desk', size=(32, 32), DATA)",
        "test.parquet",
        "7070fe2889f26dd5",
    ),
    "camvid": (
        "9e088ab60c6c",
        "Segmentation(host='vit_desk', size=(176, 240), DATA)",
        "test/0001TP_008550.jpg",
        "b89b78b2171338af",
    ),
    "bccd": ("5b0019f9231f", "Detection(host='vit_desk', size=(192, 256), DATA)", "train.json", "88a0e2b32652af35"),
    "imdb": ("9cf9a0d8cce2", "Sequences(host='sequence_encoder', DATA)", "test.parquet", "70d088054707b4a2"),
}
"""A folder of REGARD_DATA as the user's own -> (key, task, a file, the beginning of the SHA-256 of that file)."""

HEADS = "projection=LinearQKV(), dwc=0, gate=False"
BOXES = (
    "size=(84, 84), digest='', mean=(), std=(), resize='stretch', scales=(), width=96, strides=(8, 16, 32), "
    "anchor=3.0, ratios=(0.75, 1.0, 1.33), proposals=(500, 200), candidates=0, rois=64, head=192, "
    "mask_head=(64, 2), detections=0, split='val', limit=0, corrupt='stop', val=0.0, val_seed=0"
)
DEFAULTS: tuple[str, ...] = (
    "Recipe(epochs=20, batch=64, accumulate=1, optimizer='adamw', lr=0.002, betas=(0.9, 0.98), weight_decay=0.05, "
    "warmup=0.1, floor=0.0, clip=1.0, smoothing=0.1, mixup=0.0, cutmix=0.0, augment='crop', ema=0.0, "
    "precision='32-true', erasing=0.0, cooldown=0.0, stop_after=0, schedule='cosine', power=0.9, milestones=(), "
    "average=0)",
    "Classification(host='vit_desk', data='digits-canvas', size=(84, 84), digest='', mean=(), std=(), classes=0, "
    "init='zero', split='test', val=0.0, val_seed=0, limit=0, cut=False, corrupt='stop', download=False, "
    "class_weights=())",
    "Detection(host='vit_desk', data='cued-digits', detector='faster', BOXES)",
    "Instances(host='vit_desk', data='cued-digits', detector='mask', BOXES)",
    "Segmentation(host='vit_desk', data='cued-digits', size=(84, 84), digest='', mean=(), std=(), head='linear', "
    "shorter=0, stride=1.0, scales=(0.75, 1.5), void=255, classes=0, split='test', limit=0, val=0.0, val_seed=0)",
    "Translation(host='translator', data='numbers', source='en', target='de', vocabulary=8000, longest=256, "
    "place='self', split='test', beam=4, penalty=0.6, limit=0, val=0.0, val_seed=0)",
    "Sequences(host='sequence_encoder', data='listops-mini', length=0, mask=True, split='test', limit=0, tested=0, "
    "val=0.0, val_seed=0)",
    "Cells(host='vit_desk', data='digit_boards(ability=content)', init='zero', split='test', limit=0, "
    "download=False, val=0.0, val_seed=0)",
    "Softmax(HEADS, scale=None)",
    "Factors(HEADS, terms='1111', scale=1.0, window=0, stride=0, query_stride=1, positions=0, base=0.0, "
    "magnitude=1.0, axes=2, sign=0, position_scale=0.0, preset='esa', execution='auto')",
    "SKA(HEADS, scale=None, init='trunc_normal', resize='interpolate', activation='softmax', heads=0, "
    "normalise='none')",
    "CSKA(HEADS, scale=None, init='trunc_normal', resize='interpolate', activation='softmax', heads=0, "
    "normalise='none', kernel=3, rows='static', cols='static', factorised=False, bias=True, path='auto', "
    "reading='logits')",
    "XCA(HEADS, decay_temperature=False)",
    "Linear(HEADS, feature='elu', norm='', eps=1e-06)",
    "FLatten(HEADS, power=3.0, over='channels', position=True, local=0, eps=1e-06)",
    "PolaFormer(HEADS, alpha=4.0, position=False, local=0, eps=1e-06)",
    "MHLA(HEADS, m=16, init='cos', normalize='correct', norm=False, eps=1e-06)",
    "InLine(HEADS, scale=None, residual=False)",
    "Performer(HEADS, features=0, kernel='softmax', eps=1e-06)",
    "ViT3(inner='swiglu', local=True, lr=1.0, clip=True, batch=0, loss='dot')",
    "Agent(HEADS, m=49, bias=False, landmarks='avg2d', preset='paper')",
    "Linformer(HEADS, m=64, share='', per_head=False, init='uniform', scale=None)",
    "Nystrom(HEADS, m=64, landmarks='segments', iterations=6, start='matrix', kernel=0)",
    "PVT(HEADS, ratio=2, pool=0)",
    "TopK(HEADS, k=25, scale=None, indexer='exact', index_heads=4, index_width=32, rank=16, statistical=False)",
    "BRA(HEADS, regions=7, k=4, scale=None, preset='paper')",
    "MoBA(HEADS, block=(7, 7), k=2, own=True, scale=None)",
    "Reformer(HEADS, chunk=64, rounds=4, duplicates='once', scale=None, seed=0)",
    "DAT(HEADS, stride=1, groups=1, kernel=5, reach=0.0, table=True, init='paper')",
    "Window(HEADS, size=7, shift=0, table=True, scale=None, pattern='block')",
    "MiTA(HEADS, m=25, k=25, experts=1, branches='both', duplicates='multiset', landmarks='avg2d', "
    "windows='adaptive', preset='paper')",
    "NSA(HEADS, block=(2, 2), k=4, window=3, group=1, scale=None)",
    "Conv(kernel=3, axes=2, causal=False, extra='mean', groups=1, dilation=1)",
    "DeformableConv(kernel=3, axes=2, causal=False, extra='mean', version=1, groups=1, dilation=1, offset_kernel=3, "
    "mask_init=1.0)",
    "DynamicConv(kernel=13, axes=2, causal=False, extra='mean', groups=16, glu=True, renorm_padding=False, "
    "kernel_bias=False)",
    "SNE(width=None, activation='relu', init='trunc_normal', hidden_bias=True, layers=2)",
    "PSNE(width=None, activation='relu', init='trunc_normal', hidden_bias=True)",
    "FSNE(width=None, activation='relu', init='trunc_normal', hidden_bias=True, code=8, tied=True)",
)
"""Configurations with all of their fields, at the defaults. HEADS and BOXES stand for the fields of that name."""


def png(number: int, height: int, width: int, classes: int = 0) -> bytes:
    """An RGB image, or with classes a grey mask of their labels. Not compressed: no library decides about its bytes."""
    values = np.arange(height * width * (1 if classes else 3)).reshape(height, -1) * (number + 7) // 5
    rows = b"".join(b"\0" + row.tobytes() for row in (values % (classes or 251)).astype(np.uint8))
    packed = b"\x78\x01\x01" + struct.pack("<HH", len(rows), 0xFFFF ^ len(rows)) + rows
    header = struct.pack(">IIBBBBB", width, height, 8, 0 if classes else 2, 0, 0, 0)
    parts = {b"IHDR": header, b"IDAT": packed + struct.pack(">I", zlib.adler32(rows)), b"IEND": b""}
    chunks = (struct.pack(">I", len(v)) + k + v + struct.pack(">I", zlib.crc32(k + v)) for k, v in parts.items())
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def shard(first: int) -> bytes:
    """An archive of two images and their labels."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for number in (first, first + 1):
            for end, content in (("png", png(number, 9, 9)), ("cls", b"%d" % (number % 2))):
                entry = tarfile.TarInfo(f"{number:04d}.{end}")
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
    return stream.getvalue()


def objects(first: int) -> bytes:
    """COCO's annotations of two images."""
    categories = [{"id": 3, "name": "cell"}, {"id": 7, "name": "platelet"}]
    images = [{"id": n, "file_name": f"{n}.png", "width": 40, "height": 30} for n in (first, first + 1)]
    boxes = [(n, 3 + 4 * (n % 2), [4 + n, 5, 12, 10]) for n in (first, first + 1)]
    annotations = [
        {"id": n, "image_id": n, "category_id": category, "bbox": [x, y, w, h], "area": w * h, "iscrowd": 0,
         "segmentation": [[x, y, x + w, y, x + w, y + h, x, y + h]]}
        for n, category, (x, y, w, h) in boxes
    ]  # fmt: skip
    return json.dumps({"images": images, "annotations": annotations, "categories": categories}).encode()


def write_data(root: Path) -> None:
    """The user's own data of each task; every byte is always the same."""
    files = {
        **{f"photos/{('cat', 'dog')[n % 2]}/{n}.png": png(n, 20 + n, 30) for n in range(6)},
        **{
            f"parts/{part}/{name}/{n}.png": png(n + 2 * place, 20, 30)
            for place, part in enumerate(("train", "val", "test"))
            for n, name in enumerate(("cat", "dog"))
        },
        "shards/train-000.tar": shard(0),
        "shards/train-001.tar": shard(2),
        "shards/test-000.tar": shard(4),
        **{f"streets/images/{part}/{n}.png": png(n, 24, 32) for part in ("train", "test") for n in range(3)},
        **{f"streets/masks/{part}/{n}.png": png(n, 24, 32, 4) for part in ("train", "test") for n in range(3)},
        "streets/classes.txt": b"road\nsky\ntree\n",
        "objects/train.json": objects(1),
        "objects/val.json": objects(3),
        **{f"objects/images/{n}.png": png(n, 30, 40) for n in range(1, 5)},
        "clipped/train.json": objects(1).replace(b"[5, 5, 12, 10]", b"[35, 5, 12, 10]"),
        "clipped/val.json": objects(3),
        **{f"clipped/images/{n}.png": png(n, 30, 40) for n in range(1, 5)},
        "whole/train.json": objects(1).replace(b'"category_id": 7', b'"category_id": 3'),
        **{f"whole/images/{n}.png": png(n, 30, 40) for n in range(1, 3)},
        **{f"yolo/images/{('train', 'val')[n % 2]}/{n}.png": png(n, 30, 40) for n in range(4)},
        **{f"yolo/labels/{('train', 'val')[n % 2]}/{n}.txt": b"%d .5 .5 .2 .2\n" % (n // 2) for n in range(4)},
        "yolo/data.yaml": b"names: [no, yes]\n",
        **{f"listed/{('cat', 'dog')[n % 2]}/{n}.png": png(n, 20, 30) for n in range(8)},
        "listed/labels.csv": b"file,label,split\n"
        + b"".join(b"%d.png,%s,%s\n" % (n, (b"cat", b"dog")[n % 2], (b"train", b"test")[n // 4]) for n in range(8)),
        "texts/train.en": b"one house\ntwo green houses\n",
        "texts/train.de": "ein Haus\nzwei grüne Häuser\n".encode(),
        "texts/val.en": b"three houses\n",
        "texts/val.de": "drei Häuser\n".encode(),
        "reviews/train.csv": b"text,label\na good film,1\na bad film,0\n",
        "reviews/test.csv": b"text,label\ngood,1\n",
        "pairs.tsv": b"text1\ttext2\tlabel\nup\tdown\tno\nup\tup\tyes\nin\tin\tyes\nin\tout\tno\nso\tso\tyes\n",
    }
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    write_record(root / "saved" / "model.json", MODEL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data of `write_data`."""
    root = tmp_path_factory.mktemp("data")
    write_data(root)
    return root


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No digest that was kept before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def read(text: str) -> Any:
    """A spelled run, or a part of one."""
    return parse(text, (*TASKS, Recipe, Run, Saved))


def shown(run: Run) -> str:
    """What the key is made of, for a test that fails."""
    return f"the key of {spell(run.identity())}"


@pytest.mark.parametrize("name", RUNS)
def test_the_key_of_a_run_is_frozen(name: str, folder: Path) -> None:
    key, text = RUNS[name]
    run = read(text.replace("FOLDER", str(folder)))
    assert run.key == key, shown(run)


@pytest.mark.parametrize(("task", "data"), PLAIN)
def test_the_key_of_a_run_without_options_is_frozen(task: str, data: str) -> None:
    (kind,) = (kind for kind in TASKS if kind.name == task)
    values = kind.defaults(data)
    run = Run(task=kind(data=data, **values["task"]), recipe=Recipe(**values["recipe"]))
    assert run.key == PLAIN[task, data], shown(run)


@pytest.mark.parametrize("text", DEFAULTS, ids=lambda text: text.partition("(")[0])
def test_the_defaults_that_keys_leave_out_are_frozen(text: str) -> None:
    """With another default, new runs would have the keys of old ones that were trained otherwise."""
    value = read(text.replace("HEADS", HEADS).replace("BOXES", BOXES))
    needed = [field.name for field in fields(value) if field.default is field.default_factory is MISSING]
    assert spell(value) == spell(type(value)(**{name: getattr(value, name) for name in needed}))


@pytest.mark.parametrize(("study", "scale", "label", "seed"), ROWS, ids=lambda part: str(part).replace(" ", "_"))
def test_the_key_of_a_row_of_a_study_is_frozen(study: str, scale: str, label: str, seed: int) -> None:
    found = load_study(study)
    row = next(row for row in found.rows(scale) if row.label == label)
    run = found.run(scale, row, seed)
    assert run.key == ROWS[study, scale, label, seed], shown(run)


def test_the_name_and_the_key_of_a_changed_study_are_frozen(folder: Path) -> None:
    study = load_study("quickstart").elsewhere("smoke", str(folder / "photos"), recipe={"epochs": 3, "lr": 1})
    (row,) = study.rows("smoke", "softmax")
    assert study.setting_name("smoke") == "smoke+photos_11fb+epochs_3+lr_1.0"
    assert study.run("smoke", row, 0).key == "d6acf6e16c7f"


@pytest.mark.parametrize("name", FOLDERS)
def test_the_key_of_a_run_on_a_folder_of_real_data_is_frozen(name: str, data_root: Path) -> None:
    key, task, file, digest = FOLDERS[name]
    folder = data_root / name
    path = folder / file
    if not path.is_file():
        pytest.skip(f"needs {name}: REGARD_DATA={data_root} has no {name}/{file}")
    if not hashlib.sha256(path.read_bytes()).hexdigest().startswith(digest):
        pytest.skip(f"needs {name} as it was when its key was frozen: {path} has other content")
    run = read(f"Run(task={task.replace('DATA', f'data={str(folder)!r}')})")
    assert run.key == key, shown(run)
