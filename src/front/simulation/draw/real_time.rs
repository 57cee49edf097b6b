//! Worlds in real time: as much as possible happens at once.

use std::{num::NonZeroUsize, time::Duration};

use fastrand::Rng;

use super::WorldPlan;
use crate::front::simulation::witness::Fault;

/// How many times more rarely faults strike each operation than in simulated time: there are as many times more operations.
const RARER: f64 = 4.0;

/// The least times between the beats of nodes, and until they expire, on a busy machine.
const HEARTBEAT_MIN: Duration = Duration::from_millis(400);
const EXPIRY_MIN: Duration = Duration::from_secs(2);

impl WorldPlan {
    /// The plan in real time, with so many threads for each process. The network is quick, and producers hardly rest.
    pub fn in_real_time(mut self, seed: u64, threads: NonZeroUsize) -> Self {
        let random = &mut Rng::with_seed(seed ^ 0x0074_6f72_7475_7265);
        self.threads = Some(threads);
        // Nobody stops all processes at one moment.
        self.relocation = None;
        self.latency_us = [0, 100, 1_000][random.usize(0..3)];
        self.think_max_ms = [1, 4, 20][random.usize(0..3)];
        self.slow_ms = self.slow_ms.min(500);
        self.pause_max_ms = self.pause_max_ms.min(5_000);
        // A node that is starved of a processor while it shuts down falls out, and then does not release its leases.
        self.node.heartbeat = self.node.heartbeat.max(HEARTBEAT_MIN);
        self.node.expiry = self.node.expiry.max(EXPIRY_MIN);
        for process in &mut self.processes {
            process.producers *= 2;
            process.slowness = process.slowness.min(1);
        }
        for (fault, rate) in &mut self.rates {
            if !matches!(fault, Fault::Pause | Fault::ClockJump) {
                *rate /= RARER;
            }
        }
        self
    }

    /// The plan on a cluster, in processes of the operating system: without what the store of a world has to make, and what only a
    /// judge that sees each commit at once can answer for.
    pub fn on_cluster(mut self) -> Self {
        let made = [Fault::PowerLoss, Fault::DiskFault, Fault::Pause, Fault::ClockJump, Fault::LateCommit];
        self.rates.retain(|(fault, _)| !made.contains(fault));
        (self.documents, self.jobs, self.fold_size_max) = (None, None, None);
        #[cfg(feature = "http")]
        {
            self.web = None;
        }
        (self.is_durable, self.has_late_events, self.has_other_bus) = (false, false, false);
        (self.latency_us, self.drift_ppm) = (0, 0);
        self
    }
}
