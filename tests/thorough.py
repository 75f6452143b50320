"""Tests that `make test` leaves to `make test-thorough`, so that it stays short: `.ci/run` runs both."""

from __future__ import annotations

import re

NEVER = r"(?!)"

THOROUGH = {
    "adapters/optimizers/test_optimizer_forms.py": {
        "test_every_form_loads_from_a_folder_of_torch": r"bare-.*",
        "test_every_form_loads_from_every_other": r"bare-.*|.*-bare",
    },
    "adapters/test_rng.py": {
        "test_ranks_that_had_none_get_a_stream_of_their_own": r"None-fold|3-keep",
    },
    "conversion/test_interrupted_conversions.py": {
        "test_memory_stays_bounded": r"hf",
    },
    "data/test_histories.py": {
        "test_each_global_batch_is_that_of_the_run_that_was_not_interrupted": r"[36]",
        "test_no_sample_is_lost_or_repeated": r"[0-4]",
    },
    "data/test_late_streams.py": {
        "test_a_source_that_joins_late_begins_with_the_epoch_of_the_others": r".*-2",
    },
    "data/test_tracked_loader.py": {
        "test_a_loader_goes_on_with_the_batch_that_comes_next": r"(lines|shuffled records|packed).*",
    },
    "distributed/test_blocks.py": {
        "test_a_rank_of_a_block_that_misses_a_save_is_named": r"3",
    },
    "distributed/test_damage.py": {
        "test_a_byte_damaged_on_the_way_is_found_wherever_it_is": r"on, (replicas, tiny|compressed)",
        "test_a_damaged_byte_at_a_url_is_found": r"(off, columns|on, replicas).*",
        "test_a_damaged_byte_of_a_file_is_found_in_every_way_of_reading": r"on, .*",
    },
    "distributed/test_damaged_gaps.py": {
        "test_damage_in_columns_counts_for_those_who_want_them": r"on-.*",
    },
    "distributed/test_deepspeed.py": {
        "test_engines_reshard_from_two_ranks_to_three_to_four_to_one": r"zero_1_aligned|zero_3|bf16",
    },
    "distributed/test_ended_ranks.py": {
        "test_a_rank_that_dies_is_named_long_before_the_limit": r"[02]-writing-.*-4|3-before .*-4",
        "test_a_rank_that_is_stopped_or_holds_the_gil_is_waited_for": r"0-stopped-4|2-holding the GIL-1",
    },
    "distributed/test_exchange.py": {
        "test_a_rank_that_is_gone_or_stuck_ends_the_load_on_all_others": r"reading-2-killed|packing-1-stopped",
        "test_all_ranks_together_read_the_state_once": r"rows-zstd|(replicas|columns)-none",
        "test_what_fails_on_one_rank_fails_all_and_the_next_load_works": r"(reading|packing|placing)-0|passing on-2",
    },
    "distributed/test_failures.py": {
        "test_a_rank_that_does_not_come_is_named_by_all_others": r"cases0-2|cases3-3",
    },
    "distributed/test_foreign.py": {
        "test_what_torch_wrote_is_loaded_to_the_bit": r"single",
    },
    "distributed/test_frameworks_matrix.py": {
        "test_what_another_framework_saved_is_bit_equal": r".*-fsdp3",
    },
    "distributed/test_fsdp1.py": {
        "test_a_checkpoint_is_the_whole_model_and_training_goes_on_from_it": r"(full|kept|whole).*",
        "test_a_model_is_saved_and_loaded_wherever_training_stands": r"full",
    },
    "distributed/test_holders.py": {
        "test_a_rank_reads_only_the_files_that_it_holds": r"replicas-.*|.*hosts have swapped",
    },
    "distributed/test_host_exchange.py": {
        "test_a_reader_that_is_killed_is_named_at_once_and_leaves_nothing": r"taking-one host|passing on-two",
        "test_each_byte_is_read_once_and_comes_once_to_each_other_host": r"(two, mixed|three.*)-(columns|replicas)",
    },
    "distributed/test_layouts.py": {
        "test_noise_differs_from_the_truth_everywhere": r"single|fsdp3|pp2_tp2",
        "test_put_together_a_layout_is_the_truth": r"(single|fsdp3|fsdp2_tp2)-adamw",
    },
    "distributed/test_load_costs.py": {
        "test_a_load_from_s3_stays_within_its_scratch_memory": r"on-.*",
        "test_a_load_stays_within_its_scratch_memory": r"replicas-none-on|columns-zstd-off",
    },
    "distributed/test_long_messages.py": {
        "test_a_state_with_much_plain_data_is_saved_and_loaded": r"sync-two ranks|async-blocks",
    },
    "distributed/test_lost_ranks.py": {
        "test_a_rank_that_is_lost_in_any_phase_is_named": r"reading, passing on",
    },
    "distributed/test_matrix.py": {
        "test_tied_weights_are_bit_equal": r"(fsdp3|tp2)-.*",
        "test_what_is_loaded_is_bit_equal": r".*-(fsdp3|fsdp2_tp2)-adamw",
    },
    "distributed/test_megatron.py": {
        "test_a_model_and_its_optimizer_change_their_grid": r".*-tp3-.*|tp2_pp2_dp2-dp3-.*",
    },
    "distributed/test_memory_tier.py": {
        "test_any_layout_resumes_what_any_other_holds": r"fsdp3-tp2|hsdp2x2-single",
    },
    "distributed/test_missed_calls.py": {
        "test_later_saves_work_after_a_rank_has_missed_one": r"0",
    },
    "distributed/test_pipelines.py": {
        "test_each_split_loads_what_each_split_has_saved": r"interleaved|schedule|two modules",
    },
    "distributed/test_plan_cache.py": {
        "test_a_save_that_fails_on_one_rank_leaves_the_next_ones_right": r"True-.*",
        "test_no_history_of_saves_makes_a_checkpoint_wrong": r"4-3",
        "test_whatever_a_plan_depends_on_is_planned_anew_by_all": r"2",
    },
    "distributed/test_sharded_subclasses.py": {
        "test_each_layout_loads_what_each_layout_has_saved": r"one|rows by 3",
    },
    "distributed/test_small_replicas.py": {
        "test_a_load_on_other_ranks_opens_the_files_with_its_rows_and_one_more": r"3",
        "test_a_load_reads_what_it_wants_and_opens_few_files": r"4",
        "test_what_many_ranks_want_is_read_once_and_nobody_connects": r"none-True|zstd-False",
    },
    "distributed/test_snapshots.py": {
        "test_a_sharded_model_that_trains_on_is_saved_as_it_was": r"copy|lazy",
        "test_ranks_change_their_state_at_once_while_collectives_run": r"lazy waves",
    },
    "distributed/test_store_values.py": {
        "test_a_message_of_any_length_arrives_and_nothing_of_it_stays": r"(?!.*(20|9) MiB).*",
        "test_a_rank_that_dies_between_parts_is_named": r"2-2",
        "test_an_error_whose_text_is_long_is_raised_on_all_and_nothing_stays": r"(hash|libuv)-.*",
    },
    "distributed/test_stragglers.py": {
        "test_a_rank_that_writes_too_slowly_is_told_from_one_that_is_stuck": r"True-seam1",
    },
    "distributed/test_waiting.py": {
        "test_ranks_ask_the_store_no_more_the_longer_they_wait": r"4-.*|.*-0\.3",
    },
    "distributed/test_wrapped_models.py": {
        "test_saving_and_loading_after_a_forward_pass_without_a_backward_pass": r".*evaluation-plain|.*backward-kept.*",
    },
    "faults/test_campaigns.py": {
        "test_nothing_is_broken_by": r"(flip-data|flip-manifest|truncate|mix-up|fail-calls) .*",
    },
    "faults/test_exit.py": {
        "test_two_ranks_end_with_or_without_their_group": r"(?!.*sleep).*",
    },
    "faults/test_kill.py": {
        "test_a_kill_at_every_call_loses_nothing": r"save",
    },
    "faults/test_killed_removal.py": {
        "test_what_is_killed_while_it_removes_harms_nothing_and_the_next_one_finishes": r"(?!gc).*",
    },
    "faults/test_object_store_faults.py": {
        "test_faults_of_the_network": r"3|10|15|20",
    },
    "faults/test_snapshot_exit.py": {
        "test_a_save_that_is_under_way_is_finished": r"lazy-(a worker is forked and saves itself|uncaught exception)",
    },
    "faults/test_store_faults.py": {
        "test_two_ranks": r"(save|async)-.*-0",
    },
    "gpu/test_order.py": {
        "test_nobody_uses_what_is_copied_before_a_late_copy_is_done": r".*-(lazy|copy)",
    },
    "integrations/test_dcp_example.py": {
        "test_a_run_stopped_by_sigterm_of_one_rank_has_saved_its_step_and_goes_on_to_the_same_bits": NEVER,
        "test_the_example_trains_and_goes_on_with_another_number_of_processes": NEVER,
    },
    "loading/test_exact_reads.py": {
        "test_a_flipped_bit_anywhere_is_found_by_every_read_that_could_use_it": r"zstd",
        "test_scratch_memory_stays_within_what_it_may_take": r"zstd-False",
    },
    "loading/test_replacement.py": {
        "test_hundreds_of_loads_beside_two_writers_get_one_checkpoint_each": NEVER,
    },
    "manager/test_data_log.py": {
        "test_a_loader_that_is_made_anew_goes_on_where_the_trainer_is": r"lines|shuffled records",
        "test_loaders_of_two_ranks_go_on_where_the_trainer_is": NEVER,
    },
    "memory/test_host_to_device.py": {
        "test_every_dtype_and_layout_arrives": r"zstd-.*|none-default",
    },
    "memory_tier/test_copies.py": {
        "test_every_image_is_on_another_host_too": r"memory-.*",
    },
    "memory_tier/test_lost_hosts.py": {
        "test_a_lost_host_is_rebuilt_from_parity": r"hosts[01]-0|hosts2-1",
        "test_a_lost_host_is_resumed_from_copies_by_any_number_of_ranks": r"[13]-1|2-0",
    },
    "memory_tier/test_replicas.py": {
        "test_a_lost_host_is_resumed_from_the_replicas": r"3-hosts1-ddp|1-hosts0-hsdp",
        "test_replicas_that_come_apart_are_named_at_each_save_and_the_writers_bytes_are_held_twice": r"0-2|1-0",
    },
    "planner/memory_tier/test_placement.py": {
        "test_equal_hosts_hold_the_same": r"(?!.*-2047-).*|3-None-2047-4",
    },
    "saving/test_interrupted.py": {
        "test_a_state_that_is_staged_in_waves_waits_for_all_of_them": NEVER,
    },
    "saving/test_many_tensors.py": {
        "test_a_second_save_makes_no_call_for_a_tensor": r"lazy",
    },
    "saving/test_progress.py": {
        "test_the_bar_draws_on_a_terminal_only": r"True",
    },
    "saving/test_repeated_saves.py": {
        "test_two_hundred_saves_leave_nothing_behind": r"lazy",
    },
    "staging/test_device_snapshots.py": {
        "test_values_are_those_that_the_stream_of_the_caller_leaves_at_the_call": r"copy|lazy",
    },
    "staging/test_snapshots.py": {
        "test_saves_in_a_row_each_have_the_values_of_their_call": r"copy|lazy",
    },
    "storage/test_webhdfs_store.py": {
        "test_overwriting_is_refused_by_name_where_a_store_cannot_replace_in_one_step": r"hdfs|ftp",
    },
    "test_benchmarks.py": {
        "test_a_benchmark_runs_at_its_least_size": r"(manifest|codec|plan_cache|load|memory_hosts) .*",
    },
    "test_examples.py": {
        "test_the_training_script_stops_at_sigterm_with_0_and_goes_on_from_what_that_saved": NEVER,
    },
    "test_notebook.py": {
        "test_the_tour_runs": NEVER,
    },
    "test_site.py": {
        "test_the_blocks_of_a_page_run_in_its_order": r"(?!tutorial).*",
        "test_the_site_builds_strictly_and_loads_nothing_from_elsewhere": NEVER,
    },
    "test_thorough.py": {
        "test_each_row_has_something_for_every_day_and_something_for_later": NEVER,
    },
}
"""By file and function: the parameters with which `make test` runs the test all the same, as a pattern of their id."""


def is_thorough(file: str, function: str, parameters: str) -> bool:
    """Returns whether `make test` leaves out a test of `file` below `tests/`; `parameters` are the id of its case."""
    every_day = THOROUGH.get(file, {}).get(function)
    return every_day is not None and re.fullmatch(every_day, parameters) is None
