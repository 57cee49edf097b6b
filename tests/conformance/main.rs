//! The conformance suite: the behaviour that every backend of the store must have, as in FoundationDB 7.3.
//!
//! Each case is an async function in the file of its capability, and appears once in the list of `every_case`. For each
//! backend the list becomes one test per case, such as `memory::atomics::add_wraps`. A further backend needs one
//! `fixture::Backend` and one line in `main`.
//!
//! Cases assert what FoundationDB promises, not the behaviour of one engine: versions are opaque but grow, a page that is exactly full may
//! say that there is more, and a watch may miss a value that changes back.

use std::process::ExitCode;

use libtest_mimic::{Arguments, Trial};

#[cfg(feature = "foundationdb")]
#[path = "../cluster/mod.rs"]
mod cluster;
mod fixture;

mod atomics;
mod conflicts;
mod lifecycle;
mod limits;
#[path = "../interleavings/moved.rs"]
mod moved;
mod options;
mod ranges;
mod read_your_writes;
mod reads;
mod runner;
mod versions;
mod versionstamps;
mod watches;
mod writes;

/// Makes one trial of each case. If a backend is missing, its trials are shown as ignored, not as passed.
macro_rules! trials {
    ($backend:ident, $store:expr, $is_missing:expr, $($file:ident { $($case:ident)* })*) => {{
        let is_missing = $is_missing;
        let mut trials = Vec::new();
        $($(
            let name = concat!(stringify!($backend), "::", stringify!($file), "::", stringify!($case));
            let prefix = concat!(stringify!($file), "/", stringify!($case));
            let trial = Trial::test(name, move || {
                crate::fixture::run(&$store, prefix, &crate::$file::$case);
                Ok(())
            });
            trials.push(trial.with_ignored_flag(is_missing));
        )*)*
        trials
    }};
}

/// Makes the trials of one backend from the list of all cases.
macro_rules! every_case {
    ($backend:ident, $store:expr, $is_missing:expr) => {
        trials! {
            $backend, $store, $is_missing,
            reads {
                a_missing_key_reads_as_none
                a_committed_value_is_read_by_later_transactions
                an_empty_value_is_not_a_missing_one
                keys_differ_by_every_byte
                values_keep_every_byte
                a_transaction_keeps_reading_its_version
                a_removed_key_is_still_read_at_an_older_version
                an_uncommitted_write_is_invisible_to_others
                a_dropped_transaction_leaves_nothing
                a_failed_commit_leaves_nothing
                a_commit_is_seen_whole
                a_future_can_be_moved_between_wakers
            }
            ranges {
                rows_come_in_the_order_of_bytes
                rows_carry_their_values
                reverse_turns_the_order_around
                the_begin_is_included_and_the_end_is_not
                a_limit_ends_the_page_and_says_so
                a_reverse_limit_takes_the_last_rows
                a_page_below_its_limit_is_the_last
                an_exactly_full_page_loses_and_repeats_nothing
                an_empty_range_has_no_rows
                an_inverted_range_reads_as_empty
                a_read_of_nothing_fails_as_any_other
                a_prefix_range_holds_just_its_keys
                target_bytes_end_a_page
                a_page_has_a_row_even_if_it_is_over_the_target
                pages_of_target_bytes_have_every_row_once
                a_target_of_no_bytes_gives_one_row_a_page
                pages_go_through_a_range
                pages_of_nothing_end_at_once
                pages_read_at_one_version
                a_range_keeps_reading_its_version
            }
            writes {
                a_set_replaces
                a_clear_removes
                clearing_a_missing_key_is_no_error
                clear_range_removes_just_its_keys
                clearing_an_empty_range_removes_nothing
                the_last_write_of_a_key_wins
                a_set_after_clear_range_stays
                a_set_before_clear_range_goes
                overlapping_clear_ranges_add_up
                the_longest_key_and_value_are_kept
                a_single_key_range_clears_just_the_key
                many_keys_commit_together
            }
            atomics {
                add_starts_a_missing_key
                add_carries
                add_wraps
                add_of_minus_one_subtracts
                add_extends_a_shorter_value
                add_cuts_a_longer_value
                add_over_an_empty_value_is_the_operand
                add_of_nothing_leaves_an_empty_value
                add_carries_through_long_numbers
                max_keeps_the_greater_number
                max_on_a_missing_key_is_the_operand
                max_has_the_length_of_the_operand
                min_keeps_the_smaller_number
                min_on_a_missing_key_is_the_operand
                min_takes_an_empty_value_for_zero
                min_has_the_length_of_the_operand
                byte_max_keeps_the_greater_text
                byte_min_keeps_the_smaller_text
                byte_max_and_min_on_a_missing_key_are_the_operand
                compare_and_clear_clears_what_is_equal
                compare_and_clear_keeps_what_differs
                compare_and_clear_leaves_a_missing_key_missing
                operations_apply_in_their_order
                operations_of_other_lengths_are_not_merged
                an_operation_after_a_clear_starts_again
                the_drain_pair_removes_an_empty_counter
                the_drain_pair_keeps_what_came_in_between
                every_concurrent_add_counts
            }
            versionstamps {
                a_key_carries_the_stamp_of_its_commit
                a_value_carries_the_stamp_of_its_commit
                a_stamp_lies_at_its_place
                a_transaction_has_one_stamp
                stamps_grow_from_commit_to_commit
                concurrent_commits_have_stamps_of_their_own
                a_stamp_is_the_version_of_its_commit
                a_pending_value_cannot_be_read
                a_range_with_a_pending_value_cannot_be_read
                a_range_with_a_pending_key_cannot_be_read
                a_key_where_a_pending_one_may_lie_cannot_be_read
                rows_before_the_read_version_are_readable_beside_a_pending_key
                a_set_does_not_make_a_pending_value_readable
                a_clear_makes_a_pending_value_readable
                clearing_the_range_takes_a_pending_key_back
                a_key_appended_after_a_clear_is_pending_and_stays
                a_place_outside_the_key_is_refused
                a_place_outside_the_value_is_refused
                appends_do_not_conflict_with_each_other
                a_scan_conflicts_with_an_append_to_its_range
                a_reader_conflicts_with_a_stamped_value
            }
            conflicts {
                a_changed_key_conflicts
                a_created_key_conflicts
                a_cleared_key_conflicts
                a_key_set_to_the_same_value_conflicts
                a_write_before_the_read_version_does_not_conflict
                a_write_elsewhere_does_not_conflict
                a_snapshot_read_does_not_conflict
                a_read_only_transaction_does_not_conflict
                a_phantom_in_a_range_conflicts
                a_phantom_in_an_empty_range_conflicts
                a_row_cleared_from_a_range_conflicts
                a_write_beside_a_range_does_not_conflict
                an_empty_range_never_conflicts
                a_limited_read_conflicts_up_to_its_last_row
                a_limited_reverse_read_conflicts_down_to_its_last_row
                a_read_below_its_limit_conflicts_to_the_end
                blind_writes_do_not_conflict
                atomic_operations_do_not_conflict
                an_atomic_operation_makes_its_readers_conflict
                a_cleared_range_makes_its_readers_conflict
                a_range_overlapping_a_cleared_range_conflicts
                an_explicit_read_conflict_counts_as_a_read
                an_explicit_read_conflict_counts_after_a_snapshot_read
                an_explicit_read_conflict_skips_written_keys
                an_explicit_read_conflict_skips_only_written_keys
                an_explicit_read_conflict_does_not_skip_operations
                an_explicit_read_conflict_does_not_skip_pending_keys
                an_explicit_read_conflict_added_before_the_write_stays
                a_read_before_the_write_stays_a_read
                reading_an_own_write_does_not_conflict
                reading_an_own_operation_conflicts
                an_operation_over_an_own_write_does_not_conflict
                an_explicit_write_conflict_makes_readers_conflict
                an_explicit_write_conflict_can_itself_conflict
                a_transaction_does_not_conflict_with_itself
                write_skew_is_prevented
                of_transactions_committed_at_once_one_wins
                a_failed_transaction_makes_no_one_conflict
                a_conflict_is_found_long_after_the_write
            }
            read_your_writes {
                a_set_is_read
                a_write_after_a_read_is_read
                cleared_keys_read_as_missing
                an_operation_on_an_unread_key_is_read_over_what_is_stored
                the_drain_pair_is_read
                a_set_hides_earlier_operations
                a_range_merges_own_and_stored_rows
                a_reverse_range_merges_the_same_rows
                a_limit_counts_merged_rows
                pages_go_through_merged_rows
                a_range_sees_just_its_part_of_own_writes
                a_cleared_range_hides_rows_but_for_later_sets
                operations_in_a_range_are_read_over_stored_rows
                a_limited_read_goes_past_what_operations_remove
                own_rows_alone_make_a_range
                a_limited_read_that_ends_at_an_own_row_conflicts_up_to_it
                a_range_over_own_writes_conflicts_beside_them
            }
            limits {
                a_long_key_is_refused
                a_long_value_is_refused
                a_bad_write_fails_a_commit_without_reads
                the_first_bad_write_counts
                the_first_of_unlike_bad_writes_counts
                a_long_key_reads_as_missing
                a_transaction_that_only_reads_has_no_size
                clearing_a_long_key_does_nothing
                keys_beyond_the_key_space_are_refused
                ranges_beyond_the_key_space_are_refused
                keys_of_the_client_itself_are_refused
                a_range_may_end_where_the_key_space_ends
                inverted_ranges_are_refused
                a_large_transaction_is_refused
                a_transaction_below_the_limit_is_committed
                conflict_ranges_count_for_the_size
                the_size_grows_with_every_kind_of_entry
            }
            versions {
                read_versions_never_go_back
                a_commit_raises_the_read_version
                a_transaction_has_one_read_version
                an_older_version_shows_the_state_of_then
                every_version_in_between_can_be_read
                a_version_before_a_commit_does_not_show_it
                a_version_before_a_commit_shows_nothing_of_its_steps
                writes_since_an_older_version_conflict
                own_writes_lie_over_an_older_version
                a_version_to_come_cannot_be_read
                an_old_transaction_cannot_read
                an_old_transaction_cannot_commit_what_it_has_read
                an_old_transaction_cannot_write_blindly
                a_transaction_that_has_read_nothing_does_not_age
                an_old_version_cannot_be_read
                an_old_version_cannot_be_written_at
                a_version_gets_old_also_if_nothing_is_written
                an_old_read_only_transaction_still_commits
                a_version_is_set_only_once_and_before_the_first_read
                version_zero_does_not_exist
                a_version_can_be_set_after_writes_and_declared_reads
                declared_reads_alone_are_compared_with_the_state_of_the_commit
            }
            watches {
                a_watch_fires_when_its_key_is_set
                a_watch_fires_when_its_key_is_created
                a_watch_fires_when_its_key_is_cleared
                a_watch_fires_when_an_operation_changes_its_key
                a_watch_fires_when_its_key_gets_a_stamp
                a_watch_ignores_other_keys
                a_watch_fires_if_its_key_changed_before_the_commit
                a_watch_outlives_its_transaction
                a_watch_fails_with_its_dropped_transaction
                a_watch_fails_with_its_reset_transaction
                a_failed_commit_arms_no_watch
                a_refused_commit_arms_no_watch
                a_watch_is_a_serializable_read
                a_change_after_a_change_back_is_noticed
                all_watches_of_a_key_fire
                watches_of_many_keys_fire_each_for_its_own
                a_task_can_wait_for_a_watch
                a_dropped_watch_disturbs_no_one
                a_key_beyond_the_key_space_cannot_be_watched
                there_are_only_so_many_watches
                a_pending_stamp_cannot_be_watched
                a_watch_reports_that_its_transaction_cannot_read
            }
            lifecycle {
                a_commit_of_nothing_has_no_stamp
                a_read_only_commit_has_no_stamp
                a_declared_write_is_something_to_commit
                a_committed_transaction_is_used_up
                a_read_only_transaction_is_used_up_by_its_commit
                a_failed_commit_uses_the_transaction_up
                a_write_after_the_commit_is_lost
                a_reset_makes_a_committed_transaction_new
                a_reset_forgets_reads_and_writes
                a_reset_forgets_the_read_version
                a_reset_forgets_a_set_read_version
                a_reset_forgets_a_bad_write
                a_cancelled_transaction_fails
                a_reset_makes_a_cancelled_transaction_new
                a_commit_undoes_no_cancel
                a_cancel_during_the_commit_holds
                a_cancel_after_the_commit_holds
                a_cancel_during_the_pause_before_the_next_try_ends_the_run
                a_commit_that_ends_after_a_reset_disturbs_nothing
                clones_of_a_database_share_it
                a_transaction_can_be_used_from_many_tasks
            }
            runner {
                a_body_is_committed_and_its_value_returned
                a_conflict_is_tried_again_on_the_new_state
                writes_of_failed_attempts_are_forgotten
                the_limit_of_attempts_ends_it
                the_limit_of_time_ends_it
                a_policy_of_one_attempt_tries_once
                an_error_of_the_body_is_returned_at_once
                a_final_error_of_the_commit_is_returned_at_once
                a_retryable_error_of_the_body_is_tried_again
                a_read_only_body_is_run_once
                concurrent_increments_are_not_lost
                a_body_reads_its_own_writes
                a_cancelled_body_is_not_tried_again
                a_body_that_commits_by_itself_is_tried_again
                whatever_the_store_calls_retryable_is_tried_again
            }
            options {
                everything_fails_after_the_time_limit
                a_time_limit_counts_from_when_the_transaction_was_made
                a_bad_write_counts_more_than_the_time_limit
                a_reset_forgets_the_time_limit
                a_time_limit_ends_a_run
                a_transaction_over_its_own_limit_is_refused
                a_bad_size_limit_is_refused
                priorities_change_no_outcome
                conflicts_are_reported
                conflicts_are_reported_only_if_asked_for
                of_many_conflicts_some_are_reported
                options_survive_retries
                the_last_try_of_a_run_reports_its_conflicts
                asking_for_conflicts_disturbs_no_later_transaction
                a_body_that_commits_by_itself_has_the_same_limit
                options_survive_whatever_a_body_does
            }
        }
    };
}

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    if cfg!(not(feature = "foundationdb")) {
        eprintln!(
            "SKIPPED, not passed: all tests on FoundationDB, those of this suite and of tests/foundationdb: they need \
             --features foundationdb, and a server"
        );
    }
    let mut trials = every_case!(memory, fixture::MEMORY, false);
    trials.extend(every_case!(durable, fixture::DURABLE, false));
    #[cfg(feature = "foundationdb")]
    trials.extend(every_case!(foundationdb, fixture::FOUNDATIONDB, cluster::is_missing()));
    let conclusion = libtest_mimic::run(&arguments, trials);
    #[cfg(feature = "foundationdb")]
    {
        fixture::stop_cluster();
        notibus::store::stop_network();
    }
    conclusion.exit_code()
}
