"""Every trap the doctor knows, in the order in which they are looked for."""

from hirank.doctor import batch, files, gradients, precision, shapes, state, targets
from hirank.doctor.trap import Trap

__all__ = ["TRAPS"]

TRAPS: tuple[Trap, ...] = (
    # who gets a gradient, and who is moved by it
    gradients.nothing_trainable,
    gradients.no_input_gradients,
    gradients.base_weights_trainable,
    gradients.optimizer_misses_trainable,
    gradients.optimizer_holds_strangers,
    gradients.optimizer_holds_frozen,
    gradients.learning_rate_zero,
    gradients.unused_under_ddp,
    gradients.adapter_never_runs,
    # precision
    precision.updates_round_away,
    precision.half_magnitude,
    precision.half_magnitude_on_quantised_base,
    precision.fp16_weights_with_scaler,
    precision.weights_not_finite,
    precision.zero_rows,
    # the state of the adapter
    state.merged_while_training,
    state.several_trained_at_once,
    state.inactive_trainable,
    state.stale_dora_cache,
    state.adapter_on_meta,
    state.factors_both_zero,
    state.dora_without_magnitude,
    state.magnitude_frozen,
    state.dropout_second_gemm,
    state.dropout_in_eval,
    # rank and scale
    shapes.rank_above_layer,
    shapes.adapter_larger_than_layer,
    shapes.scale_far_off,
    shapes.scale_disagrees,
    # the choice of layers
    targets.target_matches_nothing,
    targets.pattern_matches_nothing,
    targets.saved_and_targeted,
    targets.targets_reach_other_towers,
    targets.targets_skip_blocks,
    targets.tied_embeddings,
    # the adapter folder
    files.alpha_missing,
    files.dora_flag_disagrees,
    files.file_weights_empty,
    files.file_weights_not_finite,
    files.file_weights_untrained,
    files.resumed_from_scratch,
    files.settings_differ_from_file,
    # what the model is fed
    batch.padding_carries_loss,
    batch.end_never_learnt,
    batch.longer_than_positions,
)
