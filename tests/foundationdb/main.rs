//! The store and the bus on a real FoundationDB cluster: what only a cluster can show.
//!
//! Each trial is an async function in the file of its topic. Those that break their cluster start one of their own; the
//! others share one, each below a prefix of its own. Where there is no FoundationDB they are shown as ignored, not as
//! passed.
//!
//! The program also runs itself again as a child, where a trial needs another process; see `child`.

use std::process::ExitCode;

use libtest_mimic::{Arguments, Trial};

#[path = "../cluster/mod.rs"]
mod cluster;
#[path = "../interleavings/execute.rs"]
mod execute;
#[path = "../interleavings/steps.rs"]
mod steps;
#[path = "../interleavings/trace.rs"]
mod trace;

mod differential;
mod fixture;

/// Makes one trial of each function.
macro_rules! trials {
    ($is_missing:expr, $($file:ident { $($case:ident)* })*) => {{
        let is_missing = $is_missing;
        vec![$($({
            let name = concat!(stringify!($file), "::", stringify!($case));
            let trial = Trial::test(name, || {
                fixture::block_on($file::$case());
                Ok(())
            });
            trial.with_ignored_flag(is_missing)
        },)*)*]
    }};
}

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let trials = trials! {
        cluster::is_missing(),
        differential {
            the_embedded_store_does_what_a_cluster_does
        }
    };
    let conclusion = libtest_mimic::run(&arguments, trials);
    fixture::stop_cluster();
    notibus::store::stop_network();
    conclusion.exit_code()
}
