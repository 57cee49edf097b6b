//! The store and the bus on a real FoundationDB cluster: tests that need a cluster.
//!
//! Each trial is an async function in the file of its topic. Trials that damage their cluster start their own; the others share one, each
//! below its own prefix. Without FoundationDB, trials are shown as ignored, not as passed.
//!
//! If a trial needs another process, the program runs itself again as a child; see `child`.

#![allow(clippy::unwrap_used, reason = "a trial fails by panicking")]

use std::process::ExitCode;

use libtest_mimic::{Arguments, Trial};

#[path = "../cluster/mod.rs"]
mod cluster;
#[path = "../common/mod.rs"]
mod common;
#[path = "../interleavings/execute.rs"]
mod execute;
#[path = "../../examples/foundationdb_layer.rs"]
mod layer;
#[path = "../interleavings/moved.rs"]
mod moved;
#[cfg(feature = "http")]
#[path = "../ready/parts.rs"]
mod parts;
#[cfg(feature = "cli")]
#[allow(dead_code, reason = "its `main` prints what `run` returns")]
#[path = "../../examples/replay/main.rs"]
mod replay;
#[cfg(feature = "http")]
#[path = "../restored/steps.rs"]
mod restored_steps;
#[path = "../sharding/scenario.rs"]
mod scenario;
#[cfg(all(unix, feature = "cli", feature = "http"))]
#[path = "../served/mod.rs"]
mod served;
#[path = "../interleavings/steps.rs"]
mod steps;
#[path = "../interleavings/trace.rs"]
mod trace;

mod bus;
#[cfg(all(unix, feature = "cli", feature = "http"))]
mod busy;
#[cfg(all(unix, feature = "cli", feature = "http"))]
mod chaos;
mod child;
mod consumers;
mod differential;
mod dropped;
mod fixture;
mod fleet;
mod index;
mod load;
mod opening;
#[cfg(all(unix, feature = "cli", feature = "http"))]
mod outages;
mod processes;
#[cfg(feature = "http")]
mod ready;
mod recorders;
#[cfg(feature = "http")]
mod restored;
mod servers;
mod sharding;
#[cfg(all(unix, feature = "cli", feature = "http"))]
mod stage;
#[cfg(all(unix, feature = "cli", feature = "http"))]
mod states;

/// Makes a trial of each function.
macro_rules! trials {
    ($is_missing:expr, $($file:ident { $($(#[$condition:meta])? $case:ident)* })*) => {{
        let is_missing = $is_missing;
        Vec::from([$($($(#[$condition])? {
            let name = concat!(stringify!($file), "::", stringify!($case));
            let trial = Trial::test(name, || {
                fixture::block_on($file::$case());
                Ok(())
            });
            trial.with_ignored_flag(is_missing)
        },)*)*])
    }};
}

fn main() -> ExitCode {
    if let Some(code) = child::play() {
        return code;
    }
    let mut arguments = Arguments::from_args();
    // Trials spend most of their time waiting, so some can run at once.
    arguments.test_threads.get_or_insert(3);
    let conclusion = libtest_mimic::run(&arguments, all());
    fixture::stop_cluster();
    notibus::store::stop_network();
    conclusion.exit_code()
}

/// All trials, by file.
#[expect(clippy::too_many_lines, reason = "it is a table")]
fn all() -> Vec<Trial> {
    trials! {
        cluster::is_missing(),
        differential { the_embedded_store_does_what_a_cluster_does }
        bus {
            totals_equal_what_concurrent_producers_recorded
            a_row_has_the_life_of_its_database
            rows_carry_the_stamps_of_their_transactions
            ids_of_design_documents_are_kept
            notifiers_share_the_partitions
            a_zombie_is_fenced_off
            watches_wake_the_roles_of_other_clients
        }
        dropped {
            dropped_reads_disturb_nothing
            a_dropped_commit_happens_or_not
            pending_reads_end_with_their_transaction
            a_transaction_bears_any_disorder
            a_dropped_run_disturbs_nothing
        }
        opening {
            a_bad_cluster_file_is_refused
            an_unreachable_cluster_is_reported_in_time
            a_bad_api_version_is_refused_and_spoils_nothing
        }
        processes {
            a_killed_notifier_loses_nothing
            a_process_exits_cleanly
            #[cfg(feature = "cli")] a_history_is_replayed_on_a_cluster
            a_foreign_layer_runs_any_number_of_times_and_survives_kills
        }
        ready {
            #[cfg(feature = "http")] a_dead_notifier_is_named_on_a_cluster
            #[cfg(feature = "http")] a_dead_tail_is_named_on_a_cluster
            #[cfg(feature = "http")] a_dead_cluster_is_named
        }
        restored {
            #[cfg(feature = "http")] an_older_state_on_a_cluster
            #[cfg(feature = "http")] an_import_into_a_cluster
        }
        recorders { a_layer_in_python_records_in_its_own_transactions }
        states {
            #[cfg(all(unix, feature = "cli", feature = "http"))] a_node_says_what_the_table_says
        }
        outages {
            #[cfg(all(unix, feature = "cli", feature = "http"))] everything_ends_without_the_cluster
        }
        busy {
            #[cfg(all(unix, feature = "cli", feature = "http"))]
            a_node_works_beside_producers_that_take_all_processor_time
        }
        chaos {
            #[cfg(all(unix, feature = "cli", feature = "http"))] nothing_acknowledged_is_missing
        }
        sharding {
            readers_see_every_change_once_and_in_order_through_any_reshard
            a_parallel_job_ends_at_one_state
            a_bus_moves_to_a_cluster_and_away
            the_janitor_drops_what_is_old
        }
        consumers {
            each_row_is_counted_exactly_once_while_nodes_die_and_shards_change
            a_zombie_cannot_commit_its_effect
        }
        index {
            an_index_kept_by_three_processes_equals_the_documents
        }
        fleet {
            processes_share_the_work_while_some_die_sleep_or_come
        }
        servers {
            a_killed_server_loses_nothing
            a_run_goes_on_after_an_outage_that_is_longer_than_its_limit
            recoveries_lose_nothing
            a_cluster_that_moves_to_another_server_loses_nothing
        }
    }
}
