"""Faults that others have reported, and the tests that show what happens here instead.

A name is that of a case in the collection that the engine was built against, with the kind of fault in a few words. A
test that is renamed or removed takes its case with it, and this says so.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

CASES: dict[str, tuple[str, list[str]]] = {
    "C001": ("blocking cycle of sends", ["transport: neighbours_that_both_send_first_do_not_block",
                                         "verify: sends_that_cross_do_not_block"]),
    "C002": ("messages out of order", ["lowering: the_kth_send_of_a_channel_is_its_kth_receive",
                                       "transport: the_kth_send_meets_the_kth_receive_bit_for_bit"]),
    "C003": ("skip links", ["runtime: unusual_boundaries"]),
    "C004": ("reduction beside messages", ["bucket_overlap: fifty_delayed_steps_end",
                                           "bucket_overlap: the_order_of_all_communication_does_not_depend_on_time"]),
    "C007": ("fewer pieces than asked", ["microbatch: sizes_of_the_published_cases"]),
    "C008": ("empty pieces", ["runtime: small_batches_train", "cli: wrong_input_is_refused_by_name"]),
    "C010": ("a schedule's own conditions", ["schedules: a_schedule_that_is_not_defined_everywhere_says_where",
                                             "parity_grid: interleaving_takes_any_number_of_microbatches"]),
    "C011": ("stages out of data", ["microbatch: steps_are_counted_once_for_everybody",
                                    "runtime: short_last_batches_train"]),
    "C012": ("step counts that differ", ["microbatch: steps_are_counted_once_for_everybody",
                                         "microbatch: replicas_partition_every_epoch"]),
    "C013": ("lifetime of requests", ["transport: dropped_handles_keep_their_tensors"]),
    "C014": ("sizes that differ", ["transport: gloo_never_fills_a_buffer_of_another_size",
                                   "boundary: a_message_out_of_step_is_found",
                                   "primitives: a_disagreement_is_one_error_on_all_ranks"]),
    "C015": ("order of groups", ["groups: a_run_always_starts",
                                 "transport: sums_over_groups_that_only_their_members_open",
                                 "transport: many_starts_and_ends"]),
    "C018": ("sum for mean", ["runtime: what_is_logged_depends_on_no_layout"]),
    "C019": ("two conventions", ["parity: equals_one_process"]),
    "C023": ("hidden divisor", ["losses: reduction_sum_trains_as_mean_and_says_so",
                                "runtime: evaluation_counts_exactly_and_leaves_training_alone"]),
    "C027": ("logged loss is another", ["runtime: what_is_logged_depends_on_no_layout",
                                        "losses: next_token_loss_weighs_tokens_not_samples"]),
    "C028": ("one loss for all", ["losses: micro_batches_in_flight_keep_losses_of_their_own"]),
    "C031": ("norms counted twice", ["ties: the_norm_counts_a_tied_weight_once",
                                     "clip_norms: replicas_and_copies_are_counted_once",
                                      "runtime: what_is_logged_depends_on_no_layout"]),
    "C034": ("reduced too often", ["runtime: reduced_bytes_do_not_depend_on_microbatches"]),
    "C035": ("conditional parameters", ["runtime: a_branch_used_by_one_microbatch_of_one_replica"]),
    "C036": ("wrong divisor", ["runtime: what_is_logged_depends_on_no_layout",
                               "recorder: the_loss_is_over_what_was_counted_not_over_processes"]),
    "C040": ("old weights without saying so", [
        "updates: synchronous_programs_have_no_lag_and_one_version",
        "pipedream: the_report_says_what_kind_of_training_it_was"]),
    "C048": ("one randomness for all", [
        "draws: equal_samples_meet_other_masks_in_every_replica_microbatch_and_step_and_the_same_in_a_rerun",
        "draws: augmentations_agree_within_a_replica_and_differ_between_them",
        "draws: loading_while_others_draw_takes_nothing_from_them"]),
    "C050": ("order by timing", ["runtime: timing_moves_no_bit"]),
    "C053": ("dtypes of messages", ["boundary: any_nesting_arrives_as_it_was",
                                    "primitives: reductions",
                                    "primitives: half_precision_is_combined_in_fp32_and_rounded_once",
                                    "ring: refuses_what_it_cannot_add"]),
    "C058": ("memory layout", ["runtime: unusual_boundaries", "boundary: dense_layouts_keep_their_strides",
                               "buckets: gradients_keep_the_strides_of_their_parameters"]),
    "C059": ("nothing to send", ["replicas: empty_tensors_are_sent_and_reduced_as_such",
                                 "boundary: any_nesting_arrives_as_it_was", "primitives: reductions",
                                 "runtime: unusual_boundaries"]),
    "C063": ("links that jump", ["cut: unet_hands_its_skips_on_over_stages_in_between",
                                 "skips: a_link_over_a_stage_trains_as_in_one_process",
                                 "skips: a_cut_inside_a_residual_block_is_refused"]),
    "C064": ("split backward, several outputs", ["split: several_outputs", "split: stage_with_several_outputs"]),
    "C069": ("activations kept", ["runtime: memory_of_1f1b_is_flat_in_microbatches",
                                  "split_runs: memory_is_flat_in_microbatches",
                                  "pipedream: memory_does_not_grow_with_the_window"]),
    "C071": ("memory rises", ["runtime: memory_does_not_grow_with_steps",
                              "pipedream: memory_does_not_grow_with_the_window"]),
    "C072": ("heavy ends", ["partition: a_name_begins_a_stage_at_the_first_layer_it_matches",
                            "bubble: a_stage_three_times_as_slow_is_named"]),
    "C073": ("empty stages", ["partition: equal_layers_are_shared_evenly",
                              "partition: more_stages_than_layers_are_refused_with_both_numbers"]),
    "C074": ("slower than one", ["bubble: other_causes_are_named", "sweep: one_folder_per_job_and_a_table"]),
    "C075": ("too many threads", ["cores: threads_share_out_the_cores",
                                  "launch: threads_per_worker_reach_the_worker"]),
    "C077": ("timing without synchronising", ["bubble: every_nanosecond_has_one_name",
                                              "runtime: spans_and_windows_follow_one_another"]),
    "C079": ("a clock per rank", ["perfetto: every_message_has_an_arrow_that_keeps_causality"]),
    "C081": ("the same shuffle", ["microbatch: epochs_are_reshuffled_and_reproducible"]),
    "C082": ("seeds that differ", ["own_files: a_folder_of_ones_own_is_seen_by_every_process",
                                   "microbatch: replicas_partition_every_epoch"]),
    "C084": ("one replica is done early", [
        "microbatch: steps_are_counted_once_for_everybody", "runtime: short_last_batches_train",
        "distributed: ranks_with_fewer_batches_join_and_end_with_the_same_weights",
        "distributed_joins: ranks_join_behind_every_epoch"]),
    "C085": ("too few samples", ["refusals: refused_by_name_before_anything_starts",
                                 "runtime: fewer_samples_than_a_batch_train",
                                 "run_folder: more_samples_in_a_batch_than_there_are_is_said"]),
    "C088": ("batches of several parts", ["microbatch: take_splits_structures",
                                          "microbatch: take_names_what_it_cannot_split",
                                          "microbatch: sizes_of_the_published_cases"]),
    "C092": ("settings on one rank only", [
        "distributed: all_ranks_get_the_whole_state_of_the_optimizer_that_was_restored",
        "resume: going_on_is_bitwise_what_going_through_is"]),
    "C099": ("races on files", ["recorder: files_are_replaced_whole_or_not_at_all",
                                "run_folder: the_end_of_a_run_is_told_without_its_folder",
                                "store: a_checkpoint_appears_when_all_ranks_are_down",
                                "store: a_full_disk_is_reported_and_training_goes_on"]),
    "C102": ("interrupted is not success", ["launch: a_worker_that_leaves_early_is_a_failure",
                                            "dry_run: whatever_a_model_raises_is_named"]),
    "C105": ("shutdown", ["launch: ends_fifty_times", "transport: abort_ends_the_waits_of_both_sides"]),
    "C106": ("time limits", ["failures: a_frozen_worker_is_named",
                             "transport: gloo_waits_for_its_first_connection_no_longer_than_for_a_message"]),
    "C107": ("survivors", ["launch: killed_worker_is_named_with_its_last_action",
                           "failures: a_killed_fork_server_ends_the_run"]),
    "C108": ("who is missing", ["distributed: a_rank_that_stays_away_is_named_with_the_tensors",
                                "primitives: who_stays_away_is_named"]),
    "C111": ("interpolations", ["cli: interpolations_reach_the_workers_as_plain_values"]),
    "C112": ("log lines", ["launch: completes_and_hands_on_every_record",
                           "recorder: lines_of_every_rank_are_in_the_log"]),
    "C114": ("folders that collide", ["cli: five_runs_started_together_have_five_folders",
                                      "arguments: a_folder_that_holds_a_run_is_refused_and_left_alone"]),
    "C115": ("launchers", ["failures: joins_what_a_launcher_started"]),
    "C116": ("relative paths", ["cli: paths_are_relative_to_the_start_folder"]),
    "C118": ("lists and commas", ["cli: forms_of_a_list", "cli: a_path_with_a_comma", "cli: a_sweep_over_lists"]),
    "C119": ("targets that fail", ["targets: what_a_module_raises_comes_first",
                                   "targets: an_optimizer_inside_a_model_is_refused_before_it_is_built"]),
    "C122": ("one writer", ["board: all_tags_are_there_in_one_file"]),
    "C126": ("hyper-parameters", ["board: a_sweep_has_one_session_per_job_and_the_same_keys"]),
    "C131": ("dtypes of a reduction", ["ring: refuses_what_it_cannot_add",
                                       "primitives: what_has_no_result_is_refused_by_name",
                                       "half_means: the_mean_of_equal_values_is_that_value_by_every_algorithm"]),
    "C132": ("order of additions", ["ring: equals_the_fixed_order_bitwise_on_every_rank"]),
    "C134": ("unordered containers", ["buckets: the_layout_is_the_same_in_every_process"]),
    "C135": ("sparse gradients", ["replicas: sparse_gradients_are_refused_before_anything_starts",
                                  "buckets: sparse_gradients_are_refused_by_name"]),
    "C136": ("complex tables", ["complex: a_table_of_complex_numbers_keeps_its_imaginary_part",
                                "complex: complex_parameters_train_as_in_one_process"]),
    "C138": ("weights that a forward changes", ["changes: an_embedding_with_a_largest_norm_equals_one_process",
                                                "changes: copies_of_a_parameter_that_changes_are_refused"]),
    "C140": ("buffers changed and used", ["changes: a_change_of_what_an_earlier_backward_needs_is_refused",
                                          "changes: it_may_be_changed_where_no_backward_is_left_to_come",
                                          "changes: a_copy_may_be_used"]),
    "C154": ("class weights", ["loss_options: weights_in_a_list_are_torchs_own_over_the_whole_batch"]),
    "C156": ("time first", ["loss_options: outputs_with_time_first_train_as_torchs_mean"]),
    "C157": ("losses that draw", ["loss_state: what_a_loss_draws_follows_from_the_seed_alone",
                                  "loss_state: draws_differ_from_step_to_step_and_replica_to_replica"]),
    "C158": ("losses with a state", ["loss_state: a_state_is_moved_once_per_micro_batch_and_by_training_alone"]),
    "C159": ("losses of a whole batch", [
        "loss_options: a_loss_that_does_not_add_up_is_refused_where_the_batch_is_divided",
        "loss_options: a_batch_that_is_not_divided_is_the_whole"]),
    "C179": ("one call more", ["loss_state: a_state_is_moved_once_per_micro_batch_and_by_training_alone",
                               "loss_state: a_copy_changes_nothing_of_the_loss"]),
    "C180": ("synchronised BatchNorm", [
        "changes: synchronised_statistics_are_refused_where_there_is_something_to_synchronise"]),
    "C177": ("a launcher's next attempt", ["launchers: the_second_attempt_trains_in_a_folder_of_its_own"]),
    "C146": ("layers left out at random", [
        "messages: a_layer_that_cannot_be_known_before_the_run_is_refused_with_the_remedy",
        "messages: a_layer_left_out_by_pythons_own_generator_trains"]),
    "C065": ("a cut that runs a module twice", ["cut_parts: a_call_counts_once"]),
    "C144": ("models of libraries", ["library_models: trains_as_in_one_process"]),
    "C175": ("a number for a sweeper", [
        "objective: a_sweeper_gets_a_figure_of_a_training_job", "objective: optuna_optimizes_it",
        "objective: a_job_that_failed_returns_the_worst_there_is"]),
    "C090": ("the epoch's order on resume", ["resume: going_on_is_bitwise_what_going_through_is"]),
    "C093": ("schedules of the rate on resume", ["resume: going_on_is_bitwise_what_going_through_is",
                                                 "resume: another_layout_goes_on_with_the_same_numbers"]),
    "C094": ("state by name", ["resume: an_optimizers_state_goes_by_name_not_by_position"]),
    "C097": ("another number of replicas", ["resume: another_layout_goes_on_with_the_same_numbers"]),
    "C120": ("resuming into the same folder", ["resumed_runs: attempts_are_one_run"]),
}  # fmt: skip


@cache
def defined() -> set[str]:
    """`file: name` of every test function there is."""
    found = set()
    for path in Path(__file__).parent.rglob("test_*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found.add(f"{path.stem.removeprefix('test_')}: {node.name.removeprefix('test_')}")
    return found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.slow(keep=51)
def test_every_case_has_a_test(case: str) -> None:
    kind, tests = CASES[case]
    assert tests and not set(tests) - defined(), kind
