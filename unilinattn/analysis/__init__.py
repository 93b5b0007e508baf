"""Measurements of layers and models beyond scores: kinds of mixing, inner matrices, states, statistics of maps."""

from unilinattn.analysis.cls_row import ClsBias, cls_bias
from unilinattn.analysis.compare import compare_models
from unilinattn.analysis.comparison import ModelComparison, ModelMeasurements
from unilinattn.analysis.convolution import ConvolutionTaps, convolution_taps
from unilinattn.analysis.decomposition import DecompositionErrors, decomposition_errors
from unilinattn.analysis.inner import InnerMatrices, QueryKeyHistory, inner_matrices, query_key_history
from unilinattn.analysis.mixing import LayerMixing, Taxonomy, taxonomy
from unilinattn.analysis.similarity import LayerSimilarity, MapSimilarity, layer_similarity, map_similarity
from unilinattn.analysis.sinks import Sinks, sinks
from unilinattn.analysis.smoothing import Oversmoothing, oversmoothing, token_cosine
from unilinattn.analysis.statistics import LayerStatistics, MapStatistics, map_statistics
from unilinattn.analysis.tokens import (
    TokenSimilarity,
    TokenVectors,
    embeddings,
    token_keys,
    token_queries,
    token_similarity,
    token_values,
)
from unilinattn.analysis.trajectories import Projection, States, project_states, states

__all__ = [
    "ClsBias",
    "ConvolutionTaps",
    "DecompositionErrors",
    "InnerMatrices",
    "LayerMixing",
    "LayerSimilarity",
    "LayerStatistics",
    "MapSimilarity",
    "MapStatistics",
    "ModelComparison",
    "ModelMeasurements",
    "Oversmoothing",
    "Projection",
    "QueryKeyHistory",
    "Sinks",
    "States",
    "Taxonomy",
    "TokenSimilarity",
    "TokenVectors",
    "cls_bias",
    "compare_models",
    "convolution_taps",
    "decomposition_errors",
    "embeddings",
    "inner_matrices",
    "layer_similarity",
    "map_similarity",
    "map_statistics",
    "oversmoothing",
    "project_states",
    "query_key_history",
    "sinks",
    "states",
    "taxonomy",
    "token_cosine",
    "token_keys",
    "token_queries",
    "token_similarity",
    "token_values",
]
