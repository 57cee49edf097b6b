//! [`Machine`]: the disk of a durable store, the power that fails, and the disk that does.
//!
//! The store is the one that is used in production; its disk is in memory, and keeps what a disk may do with what was written and
//! not synced. When the power fails, a part of that is there, as it was drawn.

use std::{
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use crate::{
    base::{env::Env, error::Result},
    store::{
        Backend, Embedded, FolderOptions,
        testing::{DiskFault, DiskOperation, SimulatedDisk, Unsynced},
    },
};

/// How many operations of the disk a commit takes.
const COMMIT_OPERATIONS: usize = 3;

/// How many it takes with a snapshot.
const SNAPSHOT_OPERATIONS: usize = 24;

/// How many an opening takes, and more.
const OPENING_OPERATIONS: usize = 24;

/// The disk of a durable store, and the power.
pub(super) struct Machine {
    disk: SimulatedDisk,
    /// What goes wrong.
    trouble: Arc<Mutex<Trouble>>,
    /// How the folder is kept.
    options: FolderOptions,
    store: Arc<Embedded>,
    /// What its disk has made of that which was not synced when the power failed before.
    unsynced: Unsynced,
}

/// What goes wrong with a disk.
#[derive(Debug, Clone, Copy, Default)]
enum Trouble {
    /// Nothing.
    #[default]
    None,
    /// After so many operations, the power fails; or it fails in the middle of the next one, which happens, and is not answered.
    Power { after: usize, happens: bool },
    /// After so many operations, this becomes of one, and then the code of one, if any.
    Fault { after: usize, fault: DiskFault, then: Option<i32> },
    /// There is no power.
    Dark,
}

impl Trouble {
    /// What becomes of an operation.
    fn strike(&mut self) -> Option<DiskFault> {
        match self {
            Self::None => None,
            Self::Dark => Some(DiskFault::Fails(DiskFault::IO)),
            Self::Power { after, .. } | Self::Fault { after, .. } if *after > 0 => {
                *after -= 1;
                None
            }
            Self::Power { happens, .. } => {
                let fault = if *happens {
                    DiskFault::FailsAfter(DiskFault::IO)
                } else {
                    DiskFault::Fails(DiskFault::IO)
                };
                *self = Self::Dark;
                Some(fault)
            }
            Self::Fault { fault, then, .. } => {
                let fault = *fault;
                *self = match then {
                    Some(code) => Self::Fault { after: 0, fault: DiskFault::Fails(*code), then: None },
                    None => Self::None,
                };
                Some(fault)
            }
        }
    }
}

impl Machine {
    /// A machine with an empty store. `random` draws its disk.
    pub fn new(random: &mut fastrand::Rng, env: Env) -> Result<Self> {
        let disk = SimulatedDisk::new([64, 512, 4_096][random.usize(0..3)]);
        let journal_len_min = [1_000, 20_000, 1 << 30][random.usize(0..3)];
        let options = FolderOptions { journal_len_min, has_threads: false };
        Self::open(disk, options, env, Unsynced::default())
    }

    /// The machine with the store on `disk`.
    fn open(disk: SimulatedDisk, options: FolderOptions, env: Env, unsynced: Unsynced) -> Result<Self> {
        let store = Arc::new(disk.engine(env, options)?);
        let trouble = plan(&disk, Trouble::None);
        Ok(Self { disk, trouble, options, store, unsynced })
    }

    /// The store.
    pub fn store(&self) -> Arc<dyn Backend> {
        Arc::<Embedded>::clone(&self.store)
    }

    /// The version of the newest commit that the store has found of the opening that had used `version`.
    pub fn recovered(&self, version: u64) -> Option<u64> {
        self.store.history().end_of(version)
    }

    /// Lets the power fail soon.
    pub fn lose_power(&self, random: &mut fastrand::Rng) {
        let most = if random.bool() { COMMIT_OPERATIONS } else { SNAPSHOT_OPERATIONS };
        *self.trouble() = Trouble::Power { after: random.usize(0..most), happens: random.bool() };
    }

    /// Lets an operation of the disk fail soon.
    pub fn fail(&self, random: &mut fastrand::Rng) {
        let most = if random.bool() { COMMIT_OPERATIONS } else { SNAPSHOT_OPERATIONS };
        let (fault, then) = match random.u32(0..4) {
            0 => (DiskFault::Short(random.usize(1..40)), Some(DiskFault::FULL)),
            1 => (DiskFault::FailsAfter(DiskFault::IO), None),
            2 => (DiskFault::Fails(DiskFault::FULL), None),
            _ => (DiskFault::Fails([DiskFault::IO, DiskFault::TOO_MANY_FILES][random.usize(0..2)]), None),
        };
        *self.trouble() = Trouble::Fault { after: random.usize(0..most), fault, then };
    }

    /// Whether the power has failed.
    pub fn is_dark(&self) -> bool {
        matches!(*self.trouble(), Trouble::Dark)
    }

    /// Whether a snapshot or a journal is half made.
    pub fn is_making_files(&self) -> bool {
        self.disk
            .names()
            .iter()
            .any(|name| Path::new(name).extension().is_some_and(|extension| extension == "new"))
    }

    /// What goes wrong. No code that holds the lock can leave it half changed by a panic.
    fn trouble(&self) -> MutexGuard<'_, Trouble> {
        self.trouble.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Closes the store in order.
    pub fn close(&self) {
        self.disk.mend();
        self.store.close();
    }

    /// The machine after its processes were killed.
    pub fn killed(&self, env: Env) -> Result<Self> {
        Self::open(self.disk.copied(), self.options, env, Unsynced::default())
    }

    /// The machine after its power has come back, and has perhaps failed again while the store was opened. `random` decides what there
    /// is of that which was not synced.
    pub fn restarted(&self, random: &mut fastrand::Rng, env: &Env) -> Result<Self> {
        let (mut disk, unsynced) = self.disk.after_power_failure(|below| random.usize(0..below));
        if random.u32(0..3) == 0 {
            let after = random.usize(0..OPENING_OPERATIONS);
            plan(&disk, Trouble::Power { after, happens: random.bool() });
            drop(disk.engine(env.clone(), self.options));
            disk = disk.after_power_failure(|below| random.usize(0..below)).0;
        }
        Self::open(disk, self.options, env.clone(), unsynced)
    }

    /// What its disk has made of that which was not synced when the power failed before.
    pub fn unsynced(&self) -> Unsynced {
        self.unsynced
    }
}

/// Lets `trouble` happen to `disk`. Reading is not counted: it leaves no traces.
fn plan(disk: &SimulatedDisk, trouble: Trouble) -> Arc<Mutex<Trouble>> {
    let trouble = Arc::new(Mutex::new(trouble));
    let asked = Arc::clone(&trouble);
    disk.plan(move |operation| match operation {
        DiskOperation::Read(_) => None,
        _ => asked.lock().unwrap_or_else(PoisonError::into_inner).strike(),
    });
    trouble
}
