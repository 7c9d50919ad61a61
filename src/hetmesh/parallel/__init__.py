"""One module on its mesh: tensor, sequence and sharded data parallelism, checkpointing, and gradients as sums."""

from hetmesh.attention.context_attention import ContextAttention
from hetmesh.parallel.activation_checkpoint import apply_activation_checkpoint
from hetmesh.parallel.apply import AdaptedModule, ParallelModule, parallelize
from hetmesh.parallel.compile import apply_compile
from hetmesh.parallel.fully_shard import apply_fully_shard, sum_over_shards
from hetmesh.parallel.gradient_axes import ParameterAxes, gradient_axes
from hetmesh.parallel.gradient_sums import local_gradient, local_part, sum_gradients
from hetmesh.parallel.linear import Colwise, Rowwise
from hetmesh.parallel.linear_cross_entropy import CrossEntropy, logits_or_loss
from hetmesh.parallel.random_state import RandomPlace, entering, seed_by_place
from hetmesh.parallel.reduction import Reduction, TiedParameter, sum_tied_parameters, tied_parameters
from hetmesh.parallel.replicas import check_replica_gradients, check_replicas, union_over_ranks
from hetmesh.parallel.sequence_parallel import apply_sequence_parallel
from hetmesh.parallel.tensor_parallel import apply_tensor_parallel
from hetmesh.parallel.user_module import SharedSums, split_shared_sums, user_parallel_module
from hetmesh.parallel.vocabulary import VocabularyShards
