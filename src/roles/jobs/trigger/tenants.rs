//! [`Tenants`]: whose databases are, and what each of their owners may have of a trigger.

use std::{fmt, sync::Arc};

use crate::base::event::DbName;

/// The name of a tenant.
pub(super) type Tenant = Arc<str>;

/// Finds the tenant of a database.
type Of = Arc<dyn Fn(&DbName) -> String + Send + Sync>;

/// Finds the weight of a tenant.
type Weight = Arc<dyn Fn(&str) -> u32 + Send + Sync>;

/// Whose databases are, and what each tenant may have of a trigger: the jobs that run are divided among the tenants that have work, in
/// fair shares, and none can fill what waits.
///
/// By default a database belongs to the tenant that its name begins with, up to the first `/`; one without a `/` is a tenant of its
/// own. All tenants weigh the same.
///
/// ```
/// use notibus::jobs::{Tenants, TriggerOptions};
///
/// let tenants = Tenants::by(|db| db.as_str().split('-').next().unwrap_or_default().to_owned())
///     .weighted(|tenant| if tenant == "gold" { 4 } else { 1 })
///     .jobs_max(2);
/// let options = TriggerOptions { tenants, jobs_max: 16, ..TriggerOptions::index("views") };
/// ```
#[derive(Clone)]
pub struct Tenants {
    of: Of,
    weight: Weight,
    pub(super) jobs_max: usize,
    pub(super) pending_max: usize,
}

impl Tenants {
    /// Tenants that `of` finds. It is asked for each database of which there is news, and has to answer the same each time.
    pub fn by(of: impl Fn(&DbName) -> String + Send + Sync + 'static) -> Self {
        let of: Of = Arc::new(of);
        Self { of, weight: Arc::new(|_| 1), jobs_max: usize::MAX, pending_max: usize::MAX }
    }

    /// The share of a tenant is as large as `weight` says, compared with those of others; 0 counts as 1. It is asked when a tenant
    /// comes to have work.
    #[must_use]
    pub fn weighted(self, weight: impl Fn(&str) -> u32 + Send + Sync + 'static) -> Self {
        Self { weight: Arc::new(weight), ..self }
    }

    /// At most so many jobs of one tenant run at once, at least 1. Default: as many as of all together.
    #[must_use]
    pub fn jobs_max(self, jobs_max: usize) -> Self {
        Self { jobs_max, ..self }
    }

    /// For at most so many databases of one tenant something waits in memory, at least 1. What is more waits in the store, one small
    /// row for each database. Default: an eighth of [`TriggerOptions::pending_max`](crate::jobs::TriggerOptions::pending_max), and at least as
    /// many as jobs may run.
    #[must_use]
    pub fn pending_max(self, pending_max: usize) -> Self {
        Self { pending_max, ..self }
    }

    /// Whose `name` is.
    pub(super) fn of(&self, name: &DbName) -> Tenant {
        (self.of)(name).into()
    }

    /// The weight of `tenant`.
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
