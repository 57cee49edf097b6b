//! `notibus serve` and `notibus credential`, as processes.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    os::unix::fs::PermissionsExt,
    process::Stdio,
    thread,
    time::{Duration, Instant},
};

use crate::served::{LIMIT, Served, credential, notibus};

/// Returns a request that posts events.
fn post(body: &str) -> String {
    let length = body.len();
    format!(
        "POST /_notibus/events HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}"
    )
}

#[test]
fn a_node_records_delivers_and_ends_its_feeds() {
    let folder = tempfile::tempdir().unwrap();
    let store = format!("dir:{}", folder.path().display());
    let served = Served::start(&["--store", &store], None);
    assert!(served.get("/").contains("\"couchdb\":\"Welcome\""));
    assert!(served.get("/_notibus/health/ready").starts_with("HTTP/1.1 200 OK\r\n"));

    let mut feed = TcpStream::connect(served.at).unwrap();
    feed.set_read_timeout(Some(LIMIT)).unwrap();
    feed.write_all(
        b"GET /_db_updates?feed=continuous HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    )
    .unwrap();
    let mut lines = BufReader::new(feed);
    let mut line = String::new();
    let recorded = served.ask(&post(r#"[{"db":"a","type":"created"},{"db":"a","type":"updated"}]"#));
    assert!(recorded.starts_with("HTTP/1.1 201 Created\r\n"), "{recorded}");
    while !line.starts_with("{\"db_name\":\"a\",\"type\":\"created\"") {
        line.clear();
        assert!(lines.read_line(&mut line).unwrap() > 0);
    }
    let status = served.get("/_notibus/status");
    for role in ["notifier", "dispatcher", "janitor", "http"] {
        assert!(status.contains(&format!("\"{role}\"")), "{status}");
    }
    assert!(served.stop(), "it ends well");
    let mut rest = String::new();
    lines.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("{\"last_seq\":\"") && rest.ends_with("\r\n0\r\n\r\n"), "{rest:?}");

    // The recorded event is still there.
    let served = Served::start(&["--store", &store], None);
    assert!(served.get("/_db_updates").contains("{\"db_name\":\"a\",\"type\":\"created\""));
}

/// Returns a request for `target` with this header.
fn with(target: &str, header: &str) -> String {
    format!("GET {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{header}\r\n\r\n")
}

#[test]
fn credentials_are_made_and_needed() {
    let (line, secret) = credential(&["anna"]).unwrap();
    assert!(line.starts_with("anna:sha256:") && line.len() == "anna:sha256:\n".len() + 64, "{line}");
    assert!(secret.len() == 64 && !line.contains(&secret));
    assert_ne!(credential(&["anna"]).unwrap().1, secret);
    assert!(credential(&["anna", "secret"]).is_none(), "everyone sees a command line");
    assert!(credential(&["a:b"]).is_none() && credential(&[]).is_none());

    let served = Served::start(&["--store", "memory"], Some(&line));
    assert!(served.get("/_db_updates").starts_with("HTTP/1.1 401 Unauthorized\r\n"));
    let answer = served.ask(&with("/_db_updates", &format!("Authorization: Bearer {secret}")));
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    // anna:secret
    let answer = served.ask(&with("/_db_updates", "Authorization: Basic YW5uYTpzZWNyZXQ="));
    assert!(answer.starts_with("HTTP/1.1 401 Unauthorized\r\n"), "{answer}");
}

/// Regression: `serve` read credentials only once, so a removed name kept its rights until the node was started again.
#[test]
fn the_file_of_credentials_is_read_again_and_a_bad_one_changes_nothing() {
    let [(anna, first), (bob, second)] = ["anna", "bob"].map(|name| credential(&[name]).unwrap());
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), &anna).unwrap();
    let mut log = tempfile::NamedTempFile::new().unwrap();
    let arguments = ["--store", "memory", "--credentials", file.path().to_str().unwrap()];
    let served = Served::start_logging(&arguments, None, log.reopen().unwrap().into());
    let is_known = |secret: &str| {
        let answer = served.ask(&with("/_db_updates", &format!("Authorization: Bearer {secret}")));
        answer.starts_with("HTTP/1.1 200 OK\r\n")
    };
    let until = |secret: &str, expected: bool| {
        let began = Instant::now();
        while is_known(secret) != expected {
            assert!(began.elapsed() < LIMIT);
            thread::sleep(Duration::from_millis(50));
        }
    };
    assert!(is_known(&first) && !is_known(&second));
    let set_mode = |mode| std::fs::set_permissions(file.path(), PermissionsExt::from_mode(mode)).unwrap();
    let status = || served.ask(&with("/_notibus/status", &format!("Authorization: Bearer {first}")));
    // The cases are a malformed line, a name that occurs twice, and a file that others may read.
    for (bad, mode, why) in [
        ("anna:secret\n", 0o600, "line 1"),
        (&*format!("{anna}{bob}{bob}"), 0o600, "line 3"),
        (&*bob, 0o640, "640"),
    ] {
        std::fs::write(file.path(), bad).unwrap();
        set_mode(mode);
        let began = Instant::now();
        while !status().contains(why) {
            assert!(began.elapsed() < LIMIT, "{bad}: {}", status());
            thread::sleep(Duration::from_millis(50));
        }
        assert!(is_known(&first) && !is_known(&second), "{bad}");
    }
    // A feed of a removed name ends.
    let mut feed = TcpStream::connect(served.at).unwrap();
    feed.set_read_timeout(Some(LIMIT)).unwrap();
    let follow =
        with("/_db_updates?feed=continuous&heartbeat=60000", &format!("Authorization: Bearer {first}"));
    feed.write_all(follow.as_bytes()).unwrap();
    set_mode(0o600);
    until(&second, true);
    assert!(!is_known(&first));
    let mut rest = String::new();
    feed.read_to_string(&mut rest).unwrap();
    assert!(rest.starts_with("HTTP/1.1 200 OK\r\n") && rest.contains("last_seq"), "{rest}");
    // With an empty file, everybody is refused.
    std::fs::write(file.path(), "").unwrap();
    until(&second, false);
    drop(served);
    let mut text = String::new();
    log.read_to_string(&mut text).unwrap();
    assert_eq!(text.matches("the file of credentials is no good").count(), 3, "{text}");
}

#[test]
fn it_does_not_open_itself_to_others_without_credentials() {
    for (arguments, named) in [
        (&["--listen", "0.0.0.0:0"][..], "credentials are needed"),
        (&["--listen", "[::]:0"], "credentials are needed"),
        // Every user of the machine can see a command line.
        (&["--password", "secret"], "--password"),
        (&["--token", "0123456789abcdef"], "--token"),
        (&["--credentials", "anna:sha256:0123"], "anna"),
        (&["--credentials", "/does/not/exist"], "/does/not/exist"),
        (&["--listen", "here"], "--listen"),
        // Regression: `serve` accepted such a name, which never matched, so clients that used it were refused.
        (&["--host", "db.example:5985"], "--host: \"db.example:5985\" is not a bare name"),
        (&["--store", "disk:x"], "--store"),
    ] {
        let mut command = notibus();
        command.args(["serve", "--store", "memory"]);
        if arguments[0] == "--store" {
            command = notibus();
            command.arg("serve");
        }
        let output = command.args(arguments).env_remove("NOTIBUS_CREDENTIALS").output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        let errors = String::from_utf8(output.stderr).unwrap();
        assert!(errors.contains(named), "{errors}");
    }
}

#[test]
fn an_address_in_use_is_no_bad_argument() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let output = notibus().args(["serve", "--store", "memory", "--listen", &address]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(errors.contains(&address) && errors.contains("--listen names another address"), "{errors}");
}

/// Without credentials a node answers only this machine, and no foreign web pages in its browsers.
#[test]
fn an_open_node_is_asked_by_its_own_names() {
    let with = |host: &str| format!("GET / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
    let refused = "HTTP/1.1 400 Bad Request\r\n";
    let open = Served::start(&["--store", "memory", "--host", "db.example"], None);
    for host in ["localhost", "127.0.0.1:5985", "db.example"] {
        assert!(open.ask(&with(host)).starts_with("HTTP/1.1 200 OK\r\n"), "{host}");
    }
    let answer = open.ask(&with("rebound.example"));
    assert!(answer.starts_with(refused) && answer.contains("Invalid host header"), "{answer}");
    // With credentials, any host name is accepted, unless host names are given.
    let (line, _) = credential(&["anna"]).unwrap();
    let closed = Served::start(&["--store", "memory"], Some(&line));
    assert!(closed.ask(&with("db.example")).starts_with("HTTP/1.1 200 OK\r\n"));
    let named = Served::start(&["--store", "memory", "--host", "db.example"], Some(&line));
    assert!(named.ask(&with("rebound.example")).starts_with(refused));
}

/// Regression: `serve` ignored credentials that were set but could not be read, so the server was open to every user of the machine.
#[test]
fn credentials_that_cannot_be_read_do_not_open_it() {
    use std::os::unix::ffi::OsStrExt;
    let bad = std::ffi::OsStr::from_bytes(b"anna:\xff");
    let mut command = notibus();
    command.args(["serve", "--store", "memory", "--listen", "127.0.0.1:0"]).env("NOTIBUS_CREDENTIALS", bad);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // The server either prints its address or ends.
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    child.kill().unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!((&*line, output.status.code()), ("", Some(2)));
    assert!(String::from_utf8(output.stderr).unwrap().contains("NOTIBUS_CREDENTIALS"));
}

#[test]
fn credentials_say_what_may_be_done() {
    let arguments = ["indexer", "--roles", "_db_updates,x", "--reads", "shop/*"];
    let (line, secret) = credential(&arguments).unwrap();
    assert!(
        line.starts_with("indexer:sha256:") && line.ends_with(" roles=_db_updates,x reads=shop/*\n"),
        "{line}"
    );
    assert!(credential(&["anna", "--roles", "_amdin"]).is_none());
    assert!(credential(&["anna", "--reads", "a b"]).is_none());
    let served = Served::start(&["--store", "memory"], Some(&line));
    let get = |target: &str| served.ask(&with(target, &format!("Authorization: Bearer {secret}")));
    assert!(get("/_db_updates").starts_with("HTTP/1.1 200 OK\r\n"));
    assert!(get("/_notibus/status").starts_with("HTTP/1.1 401 Unauthorized\r\n"));
}

#[test]
fn pages_of_named_origins_may_ask() {
    let arguments = ["--store", "memory", "--cors-origin", "https://app.example", "--cors-credentials"];
    let served = Served::start(&arguments, None);
    let ask = |method: &str, origin: &str| {
        served.ask(&format!(
            "{method} /_db_updates HTTP/1.1\r\nHost: localhost\r\nOrigin: {origin}\r\nAccess-Control-Request-Method: PUT\r\n\
             Access-Control-Request-Headers: x-one\r\nConnection: close\r\n\r\n"
        ))
    };
    let answer = ask("OPTIONS", "https://app.example");
    for header in [
        "access-control-allow-origin: https://app.example",
        "access-control-allow-credentials: true",
        "access-control-allow-methods: GET,HEAD,POST,PUT,DELETE",
        "access-control-allow-headers: x-one",
        "access-control-max-age: 600",
    ] {
        assert!(answer.contains(&format!("\r\n{header}\r\n")), "{header}: {answer}");
    }
    assert!(!ask("OPTIONS", "https://other.example").contains("access-control-allow-origin"));
    assert!(ask("GET", "https://other.example").starts_with("HTTP/1.1 403 Forbidden\r\n"));
    for (arguments, named) in [
        (&["--cors-origin", "app.example"][..], "--cors-origin"),
        (&["--cors-origin", "*", "--cors-credentials"], "credentials"),
        (&["--cors-credentials"], "--cors-origin"),
        // Regression: `serve` accepted this, so the server was started without a warning.
        (&["--cors-origin", "*"], "every web page"),
    ] {
        let output = notibus().args(["serve", "--store", "memory"]).args(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(String::from_utf8(output.stderr).unwrap().contains(named), "{arguments:?}");
    }
}
