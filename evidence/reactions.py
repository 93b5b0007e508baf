"""Reaction SMILES of twelve kinds with seven aryl groups, beside those of `inputs/real.json`."""

from evidence import truths

ARYLS = (
    "c1ccc(C)cc1",
    "c1cccc(C)c1",
    "c1ccc(OC)cc1",
    "c1ccc(F)cc1",
    "c1ccc(Cl)cc1",
    "c1ccc(C(F)(F)F)cc1",
    "c1cccnc1",
)

KINDS = {
    "acylation": "CC(=O)Cl.NC{0}>>CC(=O)NC{0}",
    "sulfonylation": "CS(=O)(=O)Cl.NC{0}>>CS(=O)(=O)NC{0}",
    "esterification": "OC(=O){0}.CO>>COC(=O){0}",
    "hydrolysis of an ester": "CCOC(=O){0}>>OC(=O){0}",
    "hydration of a nitrile": "N#C{0}>>NC(=O){0}",
    "reduction of a nitro group": "O=[N+]([O-]){0}>>N{0}",
    "reduction of an aldehyde": "O=C{0}>>OC{0}",
    "reductive amination": "O=C{0}.C2CCNCC2>>C2CCN(C{0})CC2",
    "methylation of a phenol": "O{0}.CI>>CO{0}",
    "coupling with a boronic acid": "Br{0}.OB(O)c2ccccc2>>c2ccc(-{0})cc2",
    "removal of a Boc group": "CC(C)(C)OC(=O)NC{0}>>NC{0}",
    "chlorination of an alcohol": "OC{0}>>ClC{0}",
}


def reactions() -> list[str]:
    """Return the reactions of the repository and every kind with every aryl group, each once."""
    written = [kind.format(aryl) for kind in KINDS.values() for aryl in ARYLS]
    return list(dict.fromkeys([*truths.texts("reactions"), *written]))
