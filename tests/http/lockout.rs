//! Tests log-ins under attack: their cost, how they slow down other log-ins, and lockouts.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use notibus::http::{Access, ApiOptions, Credentials, ServerOptions};
use tokio::{io::AsyncWriteExt, net::TcpStream};

use crate::{
    client::{Answer, Connection},
    common::until,
    fixture::HttpFixture,
};

/// Starts a server with the accounts anna and bob.
async fn fixture() -> HttpFixture {
    let lines = ["anna", "bob"].map(|name| Credentials::password(name, "secret").unwrap());
    let access = Access::Credentials(lines.join("\n").parse().unwrap());
    let options = ApiOptions::default().access(access);
    HttpFixture::with(options, ServerOptions::default(), |api, _, _| api.db_updates().merge(api.status()))
        .await
}

/// Encodes plain text for the header.
fn base64(text: &str) -> String {
    const DIGITS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let encode = |part: &[u8]| {
        let bits =
            part.iter().fold(0_u32, |bits, &byte| bits << 8 | u32::from(byte)) << (8 * (3 - part.len()));
        (0..4)
            .map(|place| {
                let digit = DIGITS[(bits >> (18 - 6 * place)) as usize & 63] as char;
                if place <= part.len() { digit } else { '=' }
            })
            .collect::<String>()
    };
    text.as_bytes().chunks(3).map(encode).collect()
}

/// Makes a request with this name and password.
fn request(name: &str, password: &str) -> String {
    let secret = base64(&format!("{name}:{password}"));
    format!("GET /_db_updates HTTP/1.1\r\nHost: localhost\r\nAuthorization: Basic {secret}\r\n\r\n")
}

/// Opens a connection from another address of this machine.
async fn from(address: &str, to: SocketAddr) -> Connection {
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind(format!("{address}:0").parse().unwrap()).unwrap();
    Connection::over(socket.connect(to).await.unwrap())
}

async fn log_in(fixture: &HttpFixture, address: &str, name: &str, password: &str) -> Answer {
    let mut connection = from(address, fixture.at()).await;
    connection.send(&request(name, password)).await;
    connection.answer().await
}

/// Returns the most memory that the process has taken, in bytes.
#[cfg(target_os = "linux")]
fn peak() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10
}

#[tokio::test]
async fn a_pair_of_name_and_address_is_locked_out_after_some_failures() {
    let fixture = fixture().await;
    for guess in 0..5 {
        assert_eq!(log_in(&fixture, "127.0.0.1", "anna", &guess.to_string()).await.head.status, 401);
    }
    for (name, password) in [("anna", "6"), ("anna", "secret")] {
        let locked = log_in(&fixture, "127.0.0.1", name, password).await;
        assert_eq!(locked.head.status, 403, "{locked:?}");
        assert_eq!(
            locked.body,
            "{\"error\":\"forbidden\",\"reason\":\"Account is temporarily locked due to multiple authentication failures\"}\n"
        );
        let seconds: u64 = locked.head.headers["retry-after"].parse().unwrap();
        assert!((1..=300).contains(&seconds), "{seconds}");
    }
    // Neither another name from here nor the same name from elsewhere is locked out.
    assert_eq!(log_in(&fixture, "127.0.0.1", "bob", "secret").await.head.status, 200);
    assert_eq!(log_in(&fixture, "127.0.0.2", "anna", "secret").await.head.status, 200);
    // The server recognizes credentials that it found right, from any address.
    assert_eq!(log_in(&fixture, "127.0.0.1", "anna", "secret").await.head.status, 200);
    // An unknown name gets the same answers.
    for guess in 0..6 {
        let expected = if guess < 5 { 401 } else { 403 };
        assert_eq!(log_in(&fixture, "127.0.0.1", "carl", &guess.to_string()).await.head.status, expected);
    }
}

/// A client with the right password opens more connections than there are failures allowed, and must not lock itself out.
#[tokio::test]
async fn many_connections_of_a_right_client_share_a_check() {
    let fixture = fixture().await;
    let logins = (0..30).map(|_| log_in(&fixture, "127.0.0.1", "anna", "secret"));
    for answer in futures_util::future::join_all(logins).await {
        assert_eq!(answer.head.status, 200);
    }
    for _ in 0..4 {
        assert_eq!(log_in(&fixture, "127.0.0.1", "anna", "wrong").await.head.status, 401);
    }
}

/// Regression: the permit of a check ended with its request, but the check with its 19 MB went on. So 1,500 requests that hung up
/// took 3.6 GB.
#[cfg(target_os = "linux")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_that_hang_up_take_bounded_memory() {
    let fixture = fixture().await;
    let before = peak();
    let mut most = 0;
    for round in 0..2_000_u32 {
        let mut socket = TcpStream::connect(fixture.at()).await.unwrap();
        // Each guess of a known name from a new address takes a check.
        let name = if round % 2 == 0 { "anna" } else { &*format!("{round}") };
        socket.write_all(request(name, &format!("wrong{round}")).as_bytes()).await.unwrap();
        tokio::time::sleep(Duration::from_micros(500)).await;
        drop(socket);
        most = most.max(peak());
    }
    for n in 0..250 {
        let mut connection = from(&format!("127.0.{}.{}", 1 + n / 200, 1 + n % 200), fixture.at()).await;
        connection.send(&request("anna", &format!("wrong{n}"))).await;
        tokio::time::sleep(Duration::from_millis(2)).await;
        drop(connection);
        most = most.max(peak());
    }
    let grown = most.saturating_sub(before) >> 20;
    println!("2,250 requests that hung up took {grown} MB");
    assert!(grown < 150, "{grown} MB");
}

/// Regression: with 200 guessers a right log-in took 5.9 s.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn guessers_do_not_slow_who_logs_in() {
    let fixture = fixture().await;
    let stop = Arc::new(AtomicBool::new(false));
    let guessers: Vec<_> = (0..200_u32)
        .map(|guesser| {
            let (stop, at) = (Arc::clone(&stop), fixture.at());
            tokio::spawn(async move {
                let mut guesses = 0_u32;
                while !stop.load(Ordering::Relaxed) {
                    // A third of the guessers try one name from one address, a third any name, and a third one name from many
                    // addresses.
                    let address = match guesser % 3 {
                        2 => format!("127.1.{}.{}", guesser, 1 + guesses % 250),
                        _ => "127.0.0.1".to_owned(),
                    };
                    let name = if guesser % 3 == 1 { format!("{guesser}/{guesses}") } else { "anna".into() };
                    let mut connection = from(&address, at).await;
                    connection.send(&request(&name, &format!("{guesses}"))).await;
                    let status = connection.answer().await.head.status;
                    assert!([401, 403].contains(&status), "{status}");
                    guesses += 1;
                }
            })
        })
        .collect();
    until("the guessers", async || {
        let mut connection = from("127.0.0.1", fixture.at()).await;
        connection.send(&request("anna", "x")).await;
        connection.answer().await.head.status == 403
    })
    .await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    let began = Instant::now();
    let answer = log_in(&fixture, "127.0.0.1", "bob", "secret").await;
    let took = began.elapsed();
    let live = Instant::now();
    let mut connection = Connection::get(fixture.at(), "/_notibus/health/live").await;
    assert_eq!(connection.answer().await.head.status, 200);
    println!("a log-in beside 200 guessers took {took:?}, live {:?}", live.elapsed());
    stop.store(true, Ordering::Relaxed);
    for guesser in guessers {
        guesser.await.unwrap();
    }
    // A unit test of the checks asserts how many checks a log-in waits for.
    assert_eq!(answer.head.status, 200);
}
