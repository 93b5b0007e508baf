"""Atom maps of reactions: which scores of a product's atom rank the atom of the reactants first that it comes from?

One head of rxnmapper maps atoms (Schwaller et al., "Extraction of organic chemistry grammar from unsupervised learning
of chemical reactions", 2021): its package reads the maps off this head, and so does `atom_map`.
"""

import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

import unilinattn as ula
from evidence import checkpoints, truths
from evidence.rankings import PASSES
from evidence.scores import METHODS, scores_of, sequences_read
from evidence.truths import Input
from unilinattn import methods
from unilinattn.evaluation import mean_interval, row_scores
from unilinattn.options import Options

CHECKPOINT = "rxnmapper"

LAYER, HEAD = 10, 5
"""The layer and the head that map atoms, counted from 0."""

NEIGHBOURS = 90.0
"""Factor of the weights between the neighbours of two atoms that were mapped to each other."""

OUTSIDE = ("[CLS]", "[SEP]", ".", "~", ">>")
"""Tokens between molecules."""

Bonds = dict[int, dict[int, str]]
"""The neighbours of each atom, by positions of tokens, with the symbol of the bond."""


def bonds(tokens: Sequence[str]) -> Bonds:
    """Return the bonds between the atoms of a tokenized reaction SMILES; "" is a bond without a symbol."""
    graph: Bonds = {}
    branches: list[int] = []
    rings: dict[str, tuple[int, str]] = {}
    previous: int | None = None
    symbol = ""

    def bind(first: int, second: int, bond: str) -> None:
        graph[first][second] = graph[second][first] = bond

    for position, token in enumerate(tokens):
        if token in OUTSIDE:
            previous = None
        elif token == ")":
            previous = branches.pop()
        elif is_atom(token):
            graph[position] = {}
            if previous is not None:
                bind(previous, position, symbol)
            previous, symbol = position, ""
        elif previous is None:
            raise ValueError(f"token {position}, {token!r}, follows no atom.")
        elif token == "(":
            branches.append(previous)
        elif not token[-1].isdigit():
            symbol = token
        elif token in rings:
            start, bond = rings.pop(token)
            bind(start, previous, symbol or bond)
            symbol = ""
        else:
            rings[token] = previous, symbol
            symbol = ""
    return graph


def is_atom(token: str) -> bool:
    """Whether a token of a reaction SMILES is an atom."""
    return token not in OUTSIDE and (token[0].isalpha() or token[0] == "[")


def element(token: str) -> str:
    """Return the element of an atom, in lower case."""
    symbol = re.search(r"[A-Za-z][a-z]?", token)
    assert symbol is not None
    return symbol.group().lower()


def sides(tokens: Sequence[str]) -> tuple[list[int], list[int]]:
    """Return the positions of the atoms of the reactants and of the product."""
    atoms, arrow = [index for index, token in enumerate(tokens) if is_atom(token)], tokens.index(">>")
    return [index for index in atoms if index < arrow], [index for index in atoms if index > arrow]


def atom_map(attention: Float[Tensor, "query key"], tokens: Sequence[str]) -> dict[int, int]:
    """Return the reactant atom of each product atom, by positions, read off the attention of a head as rxnmapper does.

    The weight of two atoms of one element is their attention in both directions, and its share in the row of the
    product atom decides. The pair of the largest share is mapped first; then neither atom is mapped again, and the
    weights between their neighbours count `NEIGHBOURS` times. A product atom without a candidate is left out.
    """
    graph = bonds(tokens)
    reactants, products = sides(tokens)
    same = torch.tensor([[element(tokens[j]) == element(tokens[i]) for j in reactants] for i in products])
    weights = attention[products][:, reactants].double() + attention[reactants][:, products].T.double()
    weights *= same
    mapping = {}
    for _ in products:
        shares = weights / weights.sum(1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
        row, column = divmod(int(shares.argmax()), len(reactants))
        if shares[row, column] == 0:
            break
        product, reactant = products[row], reactants[column]
        mapping[product] = reactant
        near = torch.tensor([[i in graph[product] and j in graph[reactant] for j in reactants] for i in products])
        weights = torch.where(near, NEIGHBOURS * weights, weights)
        weights[row] = 0
        weights[:, column] = 0
    return mapping


def equivalent(tokens: Sequence[str]) -> dict[int, list[int]]:
    """Return the atoms that no bond and no token tells from each atom of the reactants, it included.

    Classes of atoms are refined by the classes of their neighbours until they are as fine as they get.
    """
    graph, (reactants, _) = bonds(tokens), sides(tokens)
    classes: dict[int, Any] = {atom: tokens[atom] for atom in reactants}
    for _ in reactants:
        finer = {
            atom: (classes[atom], sorted((bond, classes[j]) for j, bond in graph[atom].items())) for atom in reactants
        }
        numbers = {name: index for index, name in enumerate(sorted({repr(value) for value in finer.values()}))}
        classes = {atom: numbers[repr(finer[atom])] for atom in reactants}
    return {atom: [other for other in reactants if classes[other] == classes[atom]] for atom in reactants}


def context(tokens: Sequence[str], product: int, reactants: Sequence[int]) -> list[float]:
    """Return the length of the text around an atom of the product that each atom of the reactants has too.

    It is 0 for another token than that of the atom.
    """

    def shared(reactant: int, step: int) -> int:
        length = 0
        while tokens[product + step * length] == tokens[reactant + step * length] and is_inside(reactant, step, length):
            length += 1
        return length

    def is_inside(reactant: int, step: int, length: int) -> bool:
        return tokens[reactant + step * length] not in OUTSIDE

    return [float(shared(reactant, 1) + shared(reactant, -1)) for reactant in reactants]


def head(model: nn.Module, ids: Sequence[int]) -> Float[Tensor, "query key"]:
    """Return the attention map of the head that maps atoms."""
    trace = ula.trace(model, torch.tensor([ids]), progress=False)
    return ula.explain(trace, method=methods.Raw(layers=[LAYER], by_head=True), progress=False).scores[0, 0, HEAD]


def measured() -> dict[str, Any]:
    """Return hit@1 of each method among the atoms of the reactants: a mean over reactions with its interval.

    Maps are read in the row of the product's atom; methods that explain a logit explain that of the atom's token under
    a mask. An atom that is `equivalent` to the mapped one counts as it.
    """
    model, vocabulary = checkpoints.atom_maps()
    reactions = [["[CLS]", *checkpoints.smiles_tokens(text), "[SEP]"] for text in truths.texts("reactions")]
    rows: dict[str, list[list[float]]] = {}
    shown: list[tuple[int, int]] = []
    plain: dict[int, Input] = {}
    masked: dict[int, Input] = {}
    maps, heads = [], []
    for number, tokens in enumerate(reactions):
        ids = checkpoints.ids_of(tokens, vocabulary)
        heads.append(head(model, ids))
        maps.append(atom_map(heads[-1], tokens))
        for product in maps[-1]:
            plain[len(shown)] = Input(tuple(ids), product, ids[product], predicted=True)
            hidden = (*ids[:product], vocabulary.index("[MASK]"), *ids[product + 1 :])
            masked[len(shown)] = Input(hidden, product, ids[product], predicted=False)
            shown.append((number, product))
    read = sequences_read(model, masked[0])
    covered = [method for method in METHODS if read.get(method.label, PASSES + 1) <= PASSES]
    scores = scores_of(model, plain, [method for method in covered if not _explains_logit(method)])
    for index, (of_masked, _) in scores_of(model, masked, list(filter(_explains_logit, covered))).items():
        scores[index][0].update(of_masked)
    generator = torch.Generator().manual_seed(0)
    for index, (number, product) in enumerate(shown):
        tokens, (reactants, _) = reactions[number], sides(reactions[number])
        answers = equivalent(tokens)[maps[number][product]]
        relevant = torch.tensor([atom in answers for atom in reactants])
        of_atom = {label: values[reactants] for label, values in scores[index][0].items()}
        of_atom[f"head {HEAD} of layer {LAYER}"] = heads[number][product, reactants].double()
        of_atom["same text"] = torch.tensor(context(tokens, product, reactants), dtype=torch.float64)
        of_atom["recency"] = torch.arange(len(reactants), dtype=torch.float64)
        of_atom["random"] = torch.rand(len(reactants), generator=generator, dtype=torch.float64)
        for label, values in of_atom.items():
            if not relevant.all():
                hits = rows.setdefault(label, [[] for _ in reactions])[number]
                hits.append(row_scores(values[None], relevant[None]).hit_at_1)
    numbers = []
    for label, by_reaction in rows.items():
        interval = mean_interval([sum(hits) / len(hits) for hits in by_reaction if hits])
        numbers.append({"method": label, **{key: round(value, 3) for key, value in asdict(interval).items()}})
    return {"atoms": sum(map(len, rows["random"])), "numbers": sorted(numbers, key=lambda line: -line["mean"])}


def _explains_logit(method: Options) -> bool:
    return "logit" in type(method).model_fields
