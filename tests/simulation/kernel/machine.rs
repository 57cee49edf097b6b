//! [`Machine`]: the disk of a durable store, with power failures and failing operations.
//!
//! The store is the production one. Its disk is in memory, and treats unsynced writes as a real disk may: when the power fails, a random
//! part of them survives.

use std::{path::Path, sync::Arc};

use notibus::{
    Result,
    store::{Env, Store, testing::DiskStore},
};
use parking_lot::{Mutex, MutexGuard};

use crate::disk::{DiskFault, DiskOperation, SimulatedDisk, Unsynced};

/// The number of disk operations in a commit.
const COMMIT_OPERATIONS: usize = 3;

const SNAPSHOT_OPERATIONS: usize = 24;

/// More disk operations than it takes to open a store.
const OPENING_OPERATIONS: usize = 24;

/// The disk of a durable store, and its power supply.
pub struct Machine {
    disk: SimulatedDisk,
    /// The planned fault.
    trouble: Arc<Mutex<Trouble>>,
    /// The minimum length of a journal, in bytes, before a snapshot is written.
    journal_len_min: u64,
    store: DiskStore,
    /// What happened to unsynced pages in the last power failure.
    unsynced: Unsynced,
}

/// The kind of disk operation that fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Failing {
    Writes,
    Syncs,
    Renames,
    Opens,
}

impl Failing {
    const ALL: [Self; 4] = [Self::Writes, Self::Syncs, Self::Renames, Self::Opens];

    fn has(self, operation: &DiskOperation) -> bool {
        match self {
            Self::Writes => matches!(operation, DiskOperation::Write(..)),
            Self::Syncs => {
                matches!(operation, DiskOperation::Sync(_) | DiskOperation::SyncFolder)
            }
            Self::Renames => {
                matches!(operation, DiskOperation::Rename(_) | DiskOperation::Remove(_))
            }
            Self::Opens => matches!(operation, DiskOperation::Open(_)),
        }
    }
}

const CODES: [i32; 3] = [DiskFault::IO, DiskFault::FULL, DiskFault::TOO_MANY_FILES];

/// A fault that is planned for a disk.
#[derive(Debug, Clone, Copy, Default)]
enum Trouble {
    #[default]
    None,
    /// The power fails after this many operations; if `happens`, the next operation takes effect without an answer.
    Power {
        after: usize,
        happens: bool,
    },
    /// After this many operations of this kind, one has this fault, and the next one fails with the code in `then`, if there is one.
    Fault {
        of: Failing,
        after: usize,
        fault: DiskFault,
        then: Option<i32>,
    },
    Struck,
    /// The power is off.
    Dark,
}

impl Trouble {
    fn strike(&mut self, operation: &DiskOperation) -> Option<DiskFault> {
        match self {
            Self::None | Self::Struck => None,
            Self::Dark => Some(DiskFault::Fails(DiskFault::IO)),
            Self::Fault { of, .. } if !of.has(operation) => None,
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
            Self::Fault { of, fault, then, .. } => {
                let (of, fault) = (*of, *fault);
                *self = match then {
                    Some(code) => Self::Fault { of, after: 0, fault: DiskFault::Fails(*code), then: None },
                    None => Self::Struck,
                };
                Some(fault)
            }
        }
    }
}

impl Machine {
    /// Makes a machine with an empty store and a disk with random properties.
    pub fn new(random: &mut fastrand::Rng, env: Env) -> Result<Self> {
        let disk = SimulatedDisk::new([64, 512, 4_096][random.usize(0..3)]);
        let journal_len_min = [1_000, 20_000, 1 << 30][random.usize(0..3)];
        Self::open(disk, journal_len_min, env, Unsynced::default())
    }

    fn open(disk: SimulatedDisk, journal_len_min: u64, env: Env, unsynced: Unsynced) -> Result<Self> {
        let store = disk.open_in(env, journal_len_min)?;
        let trouble = plan(&disk, Trouble::None);
        Ok(Self { disk, trouble, journal_len_min, store, unsynced })
    }

    pub fn store(&self) -> Store {
        self.store.database.clone()
    }

    /// Returns the version of the newest recovered commit of the opening that used `version`; `None` if that opening is not known.
    pub fn recovered(&self, version: u64) -> Option<u64> {
        self.store.recovered(version)
    }

    /// Makes the power fail soon.
    pub fn lose_power(&self, random: &mut fastrand::Rng) {
        let most = if random.bool() { COMMIT_OPERATIONS } else { SNAPSHOT_OPERATIONS };
        *self.trouble() = Trouble::Power { after: random.usize(0..most), happens: random.bool() };
    }

    /// Makes an operation of the disk fail soon.
    pub fn fail(&self, random: &mut fastrand::Rng) {
        let of = Failing::ALL[random.usize(0..Failing::ALL.len())];
        let code = |random: &mut fastrand::Rng| CODES[random.usize(0..CODES.len())];
        let (fault, then) = match (of, random.usize(0..=CODES.len())) {
            // The rest of a partial write then either succeeds or also fails.
            (Failing::Writes, 0) => {
                (DiskFault::Short(random.usize(1..40)), random.bool().then(|| code(random)))
            }
            _ if random.bool() => (DiskFault::FailsAfter(code(random)), None),
            _ => (DiskFault::Fails(code(random)), None),
        };
        let after = random.usize(0..COMMIT_OPERATIONS);
        *self.trouble() = Trouble::Fault { of, after, fault, then };
    }

    /// Leaves little room on the disk, or none.
    pub fn fill(&self, random: &mut fastrand::Rng) {
        self.disk.resize(Some(self.disk.used() + [0, 100, 5_000][random.usize(0..3)]));
    }

    /// Sometimes makes room again.
    pub fn make_room(&self, random: &mut fastrand::Rng) {
        if random.u32(0..40) == 0 {
            self.empty();
        }
    }

    /// Makes room again.
    pub fn empty(&self) {
        self.disk.resize(None);
    }

    /// Whether a fault has struck the disk since the last call.
    pub fn has_struck(&self) -> bool {
        let mut trouble = self.trouble();
        let has_struck = matches!(*trouble, Trouble::Struck);
        if has_struck {
            *trouble = Trouble::None;
        }
        has_struck
    }

    /// Whether the power has failed.
    pub fn is_dark(&self) -> bool {
        matches!(*self.trouble(), Trouble::Dark)
    }

    /// Whether a snapshot or a journal is being written.
    pub fn is_making_files(&self) -> bool {
        self.disk
            .names()
            .iter()
            .any(|name| Path::new(name).extension().is_some_and(|extension| extension == "new"))
    }

    /// Locks the planned fault.
    fn trouble(&self) -> MutexGuard<'_, Trouble> {
        self.trouble.lock()
    }

    /// Mends the disk, and closes the store cleanly.
    pub fn close(&self) {
        self.disk.mend();
        self.empty();
        self.store.close();
    }

    /// Returns the machine after its processes were killed.
    pub fn killed(&self, env: Env) -> Result<Self> {
        self.with(self.copied(), env)
    }

    /// Returns a copy of the disk, as if the folder were copied while it is open.
    pub fn copied(&self) -> SimulatedDisk {
        let copy = self.disk.copied();
        copy.resize(None);
        copy
    }

    /// Returns the machine with another `disk`.
    pub fn with(&self, disk: SimulatedDisk, env: Env) -> Result<Self> {
        Self::open(disk, self.journal_len_min, env, Unsynced::default())
    }

    /// Returns the machine after its power came back; the power may have failed again while the store was opened. `random` decides which
    /// unsynced writes survive.
    pub fn restarted(&self, random: &mut fastrand::Rng, env: &Env) -> Result<Self> {
        // A store that is opened on a full disk writes its versions only with its first commit, but the world asks for them earlier.
        self.empty();
        let (mut disk, unsynced) = self.disk.after_power_failure(|below| random.usize(0..below));
        if random.u32(0..3) == 0 {
            let after = random.usize(0..OPENING_OPERATIONS);
            plan(&disk, Trouble::Power { after, happens: random.bool() });
            drop(disk.open_in(env.clone(), self.journal_len_min));
            disk = disk.after_power_failure(|below| random.usize(0..below)).0;
        }
        Self::open(disk, self.journal_len_min, env.clone(), unsynced)
    }

    /// Returns what happened to unsynced pages in the last power failure.
    pub fn unsynced(&self) -> Unsynced {
        self.unsynced
    }
}

/// Plans `trouble` for `disk`. Reads do not count, because they leave no trace.
fn plan(disk: &SimulatedDisk, trouble: Trouble) -> Arc<Mutex<Trouble>> {
    let trouble = Arc::new(Mutex::new(trouble));
    let asked = Arc::clone(&trouble);
    disk.plan(move |operation| match operation {
        DiskOperation::Read(..) => None,
        _ => asked.lock().strike(operation),
    });
    trouble
}
