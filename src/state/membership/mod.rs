//! Nodes, and how they divide work among them: one module for everything that is divided.
//!
//! A **node** is a process that takes part ([`Member`]): it writes a row again and again, its heartbeat ([`heartbeat`]), and lists
//! its roles. Each node watches the next few in the ring of node ids ([`neighbours`]), and removes one whose row has not changed
//! for as long as that row says, by *its own* clock; no two clocks are ever compared.
//!
//! Work is divided as the **resources** of a pool, such as the partitions of the notifier. A resource has a lease that says
//! which node owns it. Every acquisition raises the lease's epoch, and a transaction that works on the resource has the
//! lease in its read-conflict set ([`Held::check`]): a former owner that does not know yet that it has lost the lease
//! cannot commit, however late it wakes. So who lives and who is dead may be judged wrongly: that costs time, never an
//! event.
//!
//! Nobody negotiates. Which node should own which resource is the **assignment** ([`assignment`]), which all nodes compute alike
//! from what is stored: the members of the pool with their maxima, the resources, and their present owners. A **worker**
//! ([`worker`]) does the node's own part of it: it ends the work on what is to be another's and releases it, and acquires what is
//! to be its own as soon as it is free:
//!
//! ```text
//!          no owner, or its owner is no member             it is to be another's
//!  free ──────────────────────────────────────► held ──────────────────────────► stopping
//!   ▲          epoch + 1, the work starts        │        the work is asked to end   │
//!   │                                            │ fenced off, or the node fell out: │
//!   ├────────────────────────────────────────────┘ the work is aborted               │
//!   └────────────────────────────────────────────────────────────────────────────────┘
//!                          released; or taken after `handover`
//! ```
//!
//! A node that has nothing to do only reads two versions ([`changes`]) every few seconds, whatever the number of its workers: one
//! moves with joins, leaves, removals and changes of roles, one with changes of leases and resources in any pool. Only a worker
//! whose own pool has changed reads anything else.
//!
//! # Invariants
//!
//! 1. The roles of a node are stored only as long as its row is. Who has the role of a pool is a member of it.
//! 2. A lease whose owner is no member is free.
//! 3. A lease that a node owns without working on it (its work has failed, or the acquisition was committed without the
//!    node's knowledge) is found by that node in its next round, and taken again or released. Others leave it alone, and learn
//!    nothing of it.
//! 4. A node that falls out (it could not beat in time, or its row is gone) ends all its work before it goes on again.
//! 5. Each move of an assignment leaves the rest of it as it was, so that nodes that look at different moments agree.

mod assignment;
mod changes;
mod heartbeat;
mod last_seen;
mod leases;
mod member;
#[cfg(test)]
mod model;
mod neighbours;
mod options;
mod plan;
mod roles;
mod round;
mod silence;
mod status;
mod worker;

pub(crate) use changes::{changed, pool_removed};
pub(crate) use leases::{Held, Stop, Work};
pub(crate) use member::{Member, RoleGuard};
pub(crate) use neighbours::forget_nodes;
pub use options::{BalanceOptions, NodeOptions};
pub(crate) use roles::{member_rows, members};
pub(crate) use silence::{NodeRows, Silence, Watched, watch};
pub use status::NodeStatus;
pub(crate) use status::statuses;
pub(crate) use worker::{Pool, Worker};
