//! Nodes, and how they divide work among them: one module for everything that is divided.
//!
//! A **node** is a process that takes part ([`Member`]): it writes a row again and again, its heartbeat, and lists its
//! roles there. Other nodes take it for dead when *their own* clocks have seen no change of the row for long enough; no two
//! clocks are ever compared.
//!
//! Work is divided as the **resources** of a pool, such as the partitions of the notifier. A resource has a lease that says
//! which node owns it. Every acquisition raises the lease's epoch, and a transaction that works on the resource has the
//! lease in its read-conflict set ([`Held::check`]): a former owner that does not know yet that it has lost the lease
//! cannot commit, however late it wakes. So who lives and who is dead may be judged wrongly: that costs time, never an
//! event. Heartbeats and requests have keys of their own and make no work fail.
//!
//! A **worker** ([`Worker`]) balances the leases of a pool among the nodes that have its role, and runs the work
//! ([`Work`]) of those that it holds. In a round it reads nodes and leases, decides, and writes, all in one transaction.
//! While rounds find nothing to do, the node only glances ([`glance`]), once for all of its workers:
//!
//! ```text
//!              none owns it, its owner is gone            a node asks for it
//!  free ──────────────────────────────────────► held ──────────────────────────► stopping
//!   ▲          epoch + 1, the work starts        │         the work is asked to end  │
//!   │                                            │ fenced off, or the node fell out: │
//!   ├────────────────────────────────────────────┘ the work is aborted               │
//!   └────────────────────────────────────────────────────────────────────────────────┘
//!                        released, and kept for the one who asks
//! ```
//!
//! # Invariants
//!
//! 1. A lease without a row of its owner's node, or whose node does not have the pool's role, is free.
//! 2. A lease that a node owns without working on it (its work has panicked, or the acquisition was committed without the
//!    node's knowledge) is found by that node in its next round, and taken again or released.
//! 3. A request counts the resource to the one who asks, in everybody's eyes, and is void once that node is gone, the epoch
//!    has changed, or twice the deadline has passed without its being served.
//! 4. A node that falls out (it could not beat in time, or its row is gone) ends all its work before it goes on again.

mod balance;
mod glance;
mod held;
mod member;
mod options;
mod plan;
mod sightings;
mod status;
mod worker;

pub(crate) use glance::{changed, forget_nodes};
pub(crate) use held::{Held, Stop, Work};
pub(crate) use member::{Member, RoleGuard};
pub use options::{BalanceOptions, NodeOptions};
pub use status::NodeStatus;
pub(crate) use status::{nodes, roles, statuses};
pub(crate) use worker::{Pool, Worker};
