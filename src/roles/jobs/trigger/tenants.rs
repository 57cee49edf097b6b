//! [`Tenants`]: the tenants of databases, and their limits in a trigger.

use std::{fmt, sync::Arc};

use crate::base::event::DbName;

pub(super) type Tenant = Arc<str>;

/// Finds the tenant of a database.
type Of = Arc<dyn Fn(&DbName) -> String + Send + Sync>;

/// Finds the weight of a tenant.
type Weight = Arc<dyn Fn(&str) -> u32 + Send + Sync>;

/// The tenants of databases, and their limits in a trigger: running jobs are divided in fair shares among the tenants that have work,
/// and no tenant can fill the memory for waiting work.
///
/// By default the tenant is the part of a database's name before the first `/`; a name without a `/` is its own tenant.
/// All tenants have the same weight.
///
/// ```
/// use notibus::jobs::{Tenants, TriggerOptions};
///
/// let tenants = Tenants::by(|db| db.as_str().split('-').next().unwrap_or_default().to_owned())
///     .weighted(|tenant| if tenant == "gold" { 4 } else { 1 })
///     .jobs_max(2);
/// let options = TriggerOptions::index("views").tenants(tenants).jobs_max(16);
/// ```
#[derive(Clone)]
pub struct Tenants {
    of: Of,
    weight: Weight,
    pub(super) jobs_max: usize,
    pub(super) pending_max: usize,
}

impl Tenants {
    /// Makes tenants that `of` finds. It is called for each delivered database, and has to return the same each time.
    pub fn by(of: impl Fn(&DbName) -> String + Send + Sync + 'static) -> Self {
        let of: Of = Arc::new(of);
        Self { of, weight: Arc::new(|_| 1), jobs_max: usize::MAX, pending_max: usize::MAX }
    }

    /// Sets the weights: the share of a tenant is proportional to its weight; 0 counts as 1. `weight` is called when a tenant
    /// begins to have work.
    #[must_use]
    pub fn weighted(self, weight: impl Fn(&str) -> u32 + Send + Sync + 'static) -> Self {
        Self { weight: Arc::new(weight), ..self }
    }

    /// Limits the running jobs of one tenant, at least 1. Default: the limit of the trigger.
    #[must_use]
    pub fn jobs_max(self, jobs_max: usize) -> Self {
        Self { jobs_max, ..self }
    }

    /// Limits the databases of one tenant with waiting work in memory, at least 1. Further ones wait in the store, with one small
    /// row for each database. Default: an eighth of [`TriggerOptions::pending_max`](crate::jobs::TriggerOptions::pending_max), but at
    /// least the limit of running jobs.
    #[must_use]
    pub fn pending_max(self, pending_max: usize) -> Self {
        Self { pending_max, ..self }
    }

    pub(super) fn of(&self, name: &DbName) -> Tenant {
        (self.of)(name).into()
    }

    pub(super) fn weight(&self, tenant: &str) -> u64 {
        (self.weight)(tenant).max(1).into()
    }
}

impl Default for Tenants {
    fn default() -> Self {
        Self::by(|name| name.as_str().split('/').next().unwrap_or_default().to_owned())
    }
}

impl fmt::Debug for Tenants {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { jobs_max, pending_max, .. } = self;
        f.debug_struct("Tenants")
            .field("jobs_max", jobs_max)
            .field("pending_max", pending_max)
            .finish_non_exhaustive()
    }
}
