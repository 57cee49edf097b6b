//! Nodes, and how they divide work among themselves: one module for everything that is divided.
//!
//! A **node** is a process that is a member ([`Member`]). It repeatedly writes its row, which is its heartbeat ([`heartbeat`]), and lists
//! its roles. Each node watches the next few in the ring of node ids ([`neighbours`]). It removes a node whose row has not changed for as
//! long as the row allows, by *its own* clock; no two clocks are ever compared.
//!
//! Work is divided as the **resources** of a pool, such as the partitions of the notifier. The lease of a resource names the node that owns
//! it. Every acquisition raises the lease's epoch, and a transaction that works on the resource has the lease in its read-conflict set
//! ([`Held::check`]). So a former owner cannot commit, however late it finds out that it has lost the lease. Therefore a wrong judgement
//! about which nodes are alive costs time, never an event.
//!
//! Nobody negotiates. The **assignment** ([`plan`]) says which node should own which resource. All nodes compute the same assignment from
//! what is stored: the members of the pool with their maxima, the resources, and their current owners. A **worker** ([`worker`]) does the
//! node's own part of it: it ends the work on resources that other nodes should own, and releases them, and it acquires its own as soon as
//! they are free:
//!
//! ```text
//!          no owner, or its owner is not a member           another should own it
//!  free ──────────────────────────────────────► held ─────────────────────────────► stopping
//!   ▲          epoch + 1, the work starts        │          the work is asked to end    │
//!   │                                            │ fenced off, or the node dropped out: │
//!   ├────────────────────────────────────────────┘ the work is aborted                  │
//!   └───────────────────────────────────────────────────────────────────────────────────┘
//!                          released; or taken after `handover`
//! ```
//!
//! A node that has nothing to do only reads a version ([`roles`]) every second or so, whatever the number of its workers. That version
//! moves when members, leases or resources change in any pool. Then the node reads the version of each of its pools. Only a worker whose
//! own pool has changed reads anything else.
//!
//! # Invariants
//!
//! 1. The roles of a node are stored only as long as its row. A node with the role of a pool is a member of the pool.
//! 2. A lease whose owner is not a member is free.
//! 3. A node may own a lease without working on it, because its work failed or the acquisition was committed without its knowledge. It
//!    finds the lease in its next round, and takes it again or releases it. Others leave the lease alone, and are not informed.
//! 4. A node that loses its membership (it could not write a heartbeat in time, or its row is gone) ends all its work before it continues.
//! 5. Each move of an assignment leaves the rest of it unchanged, so that nodes that read at different moments agree.

mod heartbeat;
mod leases;
mod member;
mod neighbours;
mod plan;
mod roles;
mod shared;
mod status;
mod worker;

pub use leases::{BalanceOptions, NodeOptions};
pub(crate) use leases::{Held, Pool, Stop, Work};
pub(crate) use member::Member;
pub(crate) use neighbours::forget_nodes;
#[cfg(feature = "test-util")]
pub(crate) use plan::assign;
pub(crate) use roles::{changed, members};
pub use shared::RoleGuard;
#[cfg(feature = "http")]
pub(crate) use status::Handovers;
pub use status::NodeStatus;
pub(crate) use status::{Holdings, Members, Silence};
pub(crate) use worker::Worker;
