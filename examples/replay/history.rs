//! The history. It is read and checked as a whole before any of it is recorded, so that an invalid history changes nothing.

use std::{
    collections::{HashMap, HashSet},
    fs::File,
    io::{self, BufRead, BufReader, Read},
    ops::Range,
    path::Path,
};

use flate2::bufread::MultiGzDecoder;
use notibus::{
    Db, DbInstance, DbName, EventKind,
    event::{Counters, DdocId},
};

use super::Result;

pub struct Event {
    pub kind: EventKind,
    /// The index of the database in [`History::instances`].
    pub instance: usize,
    pub ddoc: Option<DdocId>,
}

/// Consecutive rows with one transaction number, from `line` on.
pub struct Transaction {
    pub line: usize,
    pub events: Range<usize>,
}

#[derive(Debug)]
pub struct Instance {
    pub db: Db,
    /// The index of its name in [`History::names`].
    pub name: usize,
    pub totals: Counters,
}

/// A name that databases have.
#[derive(Default)]
pub struct Name {
    /// The last database of that name, as an index into [`History::instances`].
    pub newest: usize,
    /// Whether that database exists after the last event.
    pub exists: bool,
}

/// A history that was read to its end and is valid.
#[derive(Default)]
pub struct History {
    pub events: Vec<Event>,
    pub transactions: Vec<Transaction>,
    pub instances: Vec<Instance>,
    pub names: Vec<Name>,
    /// The index of each name in [`History::names`].
    pub index: HashMap<DbName, usize>,
    /// The index of each database in [`History::instances`].
    pub by_id: HashMap<DbInstance, usize>,
    pub recorded: Counters,
}

impl History {
    /// Reads the history in `path`, plain or gzipped, or from standard input if `path` is "-".
    pub fn read(path: &Path) -> Result<Self> {
        let read = || {
            let is_input = path == Path::new("-");
            let source: Box<dyn Read> =
                if is_input { Box::new(io::stdin()) } else { Box::new(File::open(path)?) };
            let mut source = BufReader::new(source);
            if source.fill_buf()?.starts_with(&[0x1f, 0x8b]) {
                Self::parse(BufReader::new(MultiGzDecoder::new(source)))
            } else {
                Self::parse(source)
            }
        };
        read().map_err(|reason| format!("{}: {reason}", path.display()).into())
    }

    fn parse(source: impl BufRead) -> Result<Self> {
        let (mut history, mut number) = (Self::default(), None);
        for (line, row) in (1..).zip(source.lines()) {
            let added = row.map_err(Into::into).and_then(|row| history.row(line, &row, &mut number));
            added.map_err(|reason| format!("line {line}: {reason}"))?;
        }
        Ok(history)
    }

    /// Adds a row. `number` is the transaction number of the previous row.
    fn row(&mut self, line: usize, row: &str, number: &mut Option<u64>) -> Result<()> {
        let fields: Vec<_> = row.split('\t').collect();
        let &[seconds, transaction, op, name, doc] = &fields[..] else {
            return Err(format!("it has {} columns instead of 5", fields.len()).into());
        };
        seconds.parse::<i64>().map_err(|_| format!("{seconds:?} is not a number of seconds"))?;
        let transaction =
            transaction.parse().map_err(|_| format!("{transaction:?} is not a transaction number"))?;
        let (kind, document) = match op {
            "create" => (EventKind::Created, None),
            "delete" => (EventKind::Deleted, None),
            "update" => (EventKind::Updated, None),
            "ddoc" if doc.is_empty() => (EventKind::DdocUpdated, None),
            "ddoc" => (EventKind::DdocUpdated, Some(DdocId::new(doc)?)),
            _ => return Err(format!("op {op:?} is none of create, delete, update and ddoc").into()),
        };
        let instance = self.instance(DbName::new(name)?, kind)?;
        if number.replace(transaction) != Some(transaction) {
            let events = self.events.len()..self.events.len();
            self.transactions.push(Transaction { line, events });
        }
        self.events.push(Event { kind, instance, ddoc: document });
        self.transactions.last_mut().expect("it was just added").events.end = self.events.len();
        self.instances[instance].totals += kind.once();
        self.recorded += kind.once();
        Ok(())
    }

    /// Returns the names of the databases in `transaction`, as indices into [`History::names`].
    pub fn names_of(&self, transaction: &Transaction) -> HashSet<usize> {
        let events = &self.events[transaction.events.clone()];
        events.iter().map(|event| self.instances[event.instance].name).collect()
    }

    /// Returns the index of the database that an event of `kind` concerns.
    fn instance(&mut self, text: DbName, kind: EventKind) -> Result<usize> {
        let index = *self.index.entry(text.clone()).or_insert(self.names.len());
        self.names.resize_with(self.index.len(), Name::default);
        let name = &mut self.names[index];
        let is_created = kind == EventKind::Created;
        if is_created && name.exists {
            return Err(format!("{text:?} is created although it exists").into());
        } else if is_created {
            name.newest = self.instances.len();
            let (db, totals) = (Db::new(text, DbInstance::new()), Counters::ZERO);
            self.by_id.insert(db.instance, name.newest);
            self.instances.push(Instance { db, name: index, totals });
        } else if !name.exists {
            return Err(format!("{text:?} does not exist, so nothing else can happen to it").into());
        }
        name.exists = kind != EventKind::Deleted;
        Ok(name.newest)
    }
}
