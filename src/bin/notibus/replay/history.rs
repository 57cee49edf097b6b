//! Reading and checking a history, before any of it is recorded.

use std::{
    collections::HashMap,
    fs::File,
    io::{self, BufRead, BufReader, Read},
    path::Path,
};

use notibus::{
    Db, DbInstance, DbName, EventKind,
    event::{Counters, DdocId},
};

use crate::failure::Failure;

/// An event of the history.
#[derive(Debug)]
pub struct Event {
    /// Its kind.
    pub kind: EventKind,
    /// Index of the database in [`History::instances`].
    pub instance: usize,
    /// The design document, for `ddoc`.
    pub ddoc: Option<DdocId>,
}

/// A transaction of the history.
#[derive(Debug)]
pub struct Transaction {
    /// The line of its first row.
    pub line: u64,
    /// Its events, as a range of [`History::events`].
    pub events: std::ops::Range<usize>,
    /// The names of its databases, as indices into [`History::names`], each with the number of earlier transactions
    /// with that name.
    pub turns: Vec<(usize, u32)>,
}

/// A creation of a name.
#[derive(Debug)]
pub struct Instance {
    /// The database.
    pub db: Db,
    /// The events that the history has of it.
    pub totals: Counters,
}

/// A name of the history.
#[derive(Debug)]
pub struct Name {
    /// The name itself.
    pub text: DbName,
    /// Its creations in their order, as indices into [`History::instances`].
    pub instances: Vec<usize>,
    /// Whether a database of that name lives after the last event.
    pub lives: bool,
    transactions: u32,
    /// The last of them, as an index into [`History::transactions`].
    last: Option<usize>,
}

/// A history that was read to its end and is valid.
#[derive(Debug, Default)]
pub struct History {
    /// All events in their order.
    pub events: Vec<Event>,
    /// All transactions in their order.
    pub transactions: Vec<Transaction>,
    /// All names.
    pub names: Vec<Name>,
    /// All creations.
    pub instances: Vec<Instance>,
    /// All events by kind.
    pub recorded: Counters,
}

/// State while a history is read.
struct Parser {
    history: History,
    names: HashMap<DbName, usize>,
    /// The transaction number of the row before.
    transaction: Option<u64>,
}

impl History {
    /// Reads the history in `path`, plain or gzip, or from standard input if it is "-".
    pub fn read(path: &Path) -> Result<Self, Failure> {
        let fail = |error: io::Error| Failure::BadInput(format!("{}: {error}", path.display()));
        let source: Box<dyn Read> = if path == Path::new("-") {
            Box::new(io::stdin())
        } else {
            Box::new(File::open(path).map_err(fail)?)
        };
        let mut source = BufReader::new(source);
        let is_gzip = source.fill_buf().map_err(fail)?.starts_with(&[0x1f, 0x8b]);
        if is_gzip { Self::parse(flate2::bufread::MultiGzDecoder::new(source)) } else { Self::parse(source) }
            .map_err(|reason| Failure::BadInput(format!("{}: {reason}", path.display())))
    }

    /// Reads rows. Fails with the line and the reason of the first one that is malformed.
    fn parse(source: impl Read) -> Result<Self, String> {
        let mut rows = csv::ReaderBuilder::new()
            .delimiter(b'\t')
            .quoting(false)
            .has_headers(false)
            .flexible(true)
            .from_reader(source);
        let mut parser = Parser { history: Self::default(), names: HashMap::new(), transaction: None };
        let mut row = csv::StringRecord::new();
        loop {
            let line = rows.position().line();
            match rows.read_record(&mut row) {
                Ok(false) => return Ok(parser.history),
                Ok(true) => {
                    let line = row.position().map_or(line, csv::Position::line);
                    parser.row(line, &row).map_err(|reason| format!("line {line}: {reason}"))?;
                }
                Err(error) => return Err(format!("line {line}: {}", explain(&error))),
            }
        }
    }
}

fn explain(error: &csv::Error) -> String {
    match error.kind() {
        csv::ErrorKind::Utf8 { .. } => "it is not UTF-8".to_owned(),
        csv::ErrorKind::Io(error) => error.to_string(),
        _ => error.to_string(),
    }
}

impl Parser {
    fn row(&mut self, line: u64, row: &csv::StringRecord) -> Result<(), String> {
        let fields: Vec<_> = row.iter().collect();
        let &[seconds, transaction, op, name, doc] = &fields[..] else {
            return Err(format!("it has {} columns instead of 5", fields.len()));
        };
        seconds.parse::<i64>().map_err(|_| format!("{seconds:?} is no number of seconds"))?;
        let transaction: u64 =
            transaction.parse().map_err(|_| format!("{transaction:?} is no transaction number"))?;
        let name = DbName::new(name).map_err(|error| error.to_string())?;
        let (kind, ddoc_id) = match op {
            "create" => (EventKind::Created, None),
            "delete" => (EventKind::Deleted, None),
            "update" => (EventKind::Updated, None),
            "ddoc" if doc.is_empty() => (EventKind::DdocUpdated, None),
            "ddoc" => (EventKind::DdocUpdated, Some(DdocId::new(doc).map_err(|error| error.to_string())?)),
            _ => {
                return Err(format!("op {op:?} is none of create, delete, update and ddoc"));
            }
        };
        let (name, instance) = self.instance(&name, kind)?;
        self.event((line, transaction), name, Event { kind, instance, ddoc: ddoc_id });
        Ok(())
    }

    /// The indices of the name and the instance that an event of `kind` is about.
    fn instance(&mut self, name: &DbName, kind: EventKind) -> Result<(usize, usize), String> {
        let History { names, instances, .. } = &mut self.history;
        let index = *self.names.entry(name.clone()).or_insert_with(|| {
            names.push(Name {
                text: name.clone(),
                instances: Vec::new(),
                lives: false,
                last: None,
                transactions: 0,
            });
            names.len() - 1
        });
        let known = &mut names[index];
        match (kind, known.lives) {
            (EventKind::Created, true) => {
                return Err(format!("{name:?} is created although it exists"));
            }
            (EventKind::Created, false) => {
                let db = Db::new(name.clone(), DbInstance::new());
                known.instances.push(instances.len());
                instances.push(Instance { db, totals: Counters::ZERO });
            }
            (_, false) => {
                return Err(format!("{name:?} does not exist, so nothing else can happen to it"));
            }
            (_, true) => {}
        }
        known.lives = kind != EventKind::Deleted;
        Ok((index, *known.instances.last().expect("a name that lived was created")))
    }

    fn event(&mut self, (line, transaction): (u64, u64), name: usize, event: Event) {
        let History { events, transactions, names, instances, recorded } = &mut self.history;
        let once = event.kind.once();
        *recorded += once;
        instances[event.instance].totals += once;
        if self.transaction != Some(transaction) {
            self.transaction = Some(transaction);
            let events = events.len()..events.len();
            transactions.push(Transaction { line, events, turns: Vec::new() });
        }
        let number = transactions.len() - 1;
        let current = &mut transactions[number];
        let name_state = &mut names[name];
        if name_state.last.replace(number) != Some(number) {
            current.turns.push((name, name_state.transactions));
            name_state.transactions += 1;
        }
        events.push(event);
        current.events.end = events.len();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<History, String> {
        History::parse(text.as_bytes())
    }

    #[test]
    fn rows_of_one_number_form_a_transaction_while_they_follow_each_other() {
        let history =
            parse("1\t1\tcreate\ta\t\n1\t1\tupdate\ta\tx\n2\t2\tcreate\tb\t\n2\t1\tddoc\ta\td\n").unwrap();
        let events: Vec<_> =
            history.transactions.iter().map(|transaction| transaction.events.clone()).collect();
        assert_eq!(events, [0..2, 2..3, 3..4]);
        assert_eq!(history.transactions[2].turns, [(0, 1)]);
        assert_eq!(history.recorded, Counters { created: 2, deleted: 0, updated: 1, ddoc_updated: 1 });
        assert_eq!(
            history.instances[0].totals,
            Counters { created: 1, deleted: 0, updated: 1, ddoc_updated: 1 }
        );
    }

    #[test]
    fn a_recreated_name_is_a_new_instance() {
        let history = parse("1\t1\tcreate\ta\t\n1\t2\tdelete\ta\t\n1\t3\tcreate\ta\t\n").unwrap();
        assert_eq!(history.names[0].instances, [0, 1]);
        assert_ne!(history.instances[0].db.instance, history.instances[1].db.instance);
        assert!(history.names[0].lives);
    }

    #[test]
    fn a_malformed_row_is_reported_by_its_line() {
        for (text, reason) in [
            ("1\t1\tcreate\ta\t\nx\n", "line 2: it has 1 columns instead of 5"),
            ("one\t1\tcreate\ta\t\n", "line 1: \"one\" is no number of seconds"),
            ("1\t-1\tcreate\ta\t\n", "line 1: \"-1\" is no transaction number"),
            ("1\t1\tdrop\ta\t\n", "line 1: op \"drop\" is none of create, delete, update and ddoc"),
            ("1\t1\tcreate\t\t\n", "line 1: invalid database name: it is empty"),
            ("1\t1\tupdate\ta\tx\n", "line 1: \"a\" does not exist, so nothing else can happen to it"),
            ("1\t1\tcreate\ta\t\n1\t1\tcreate\ta\t\n", "line 2: \"a\" is created although it exists"),
            (
                "1\t1\tcreate\ta\t\n1\t2\tdelete\ta\t\n1\t3\tdelete\ta\t\n",
                "line 3: \"a\" does not exist, so nothing else can happen to it",
            ),
        ] {
            assert_eq!(parse(text).unwrap_err(), reason);
        }
        let bytes = b"1\t1\tcreate\ta\t\n1\t1\tupdate\ta\t\xff\n";
        let error = History::parse(&bytes[..]).unwrap_err();
        assert_eq!(error, "line 2: it is not UTF-8");
    }
}
