//! A client that sees every byte.

use std::{collections::HashMap, net::SocketAddr, time::Duration};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};

/// How long a test waits for an expected event.
pub const LIMIT: Duration = Duration::from_secs(20);

/// A connection.
pub struct Connection {
    pub socket: TcpStream,
    /// The received bytes that no call has returned yet.
    received: Vec<u8>,
}

/// The status and the headers of an answer.
#[derive(Debug, Clone)]
pub struct Head {
    pub status: u16,
    /// The headers, by their names in lower case.
    pub headers: HashMap<String, String>,
}

/// A whole answer.
#[derive(Debug, Clone)]
pub struct Answer {
    pub head: Head,
    pub body: String,
}

impl Answer {
    /// Parses the body as JSON.
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// Returns the rows of a feed as pairs of name and type.
    pub fn rows(&self) -> Vec<(String, String)> {
        let text = |value: &serde_json::Value| value.as_str().unwrap().to_owned();
        let rows = self.json();
        rows["results"]
            .as_array()
            .unwrap()
            .iter()
            .map(|row| (text(&row["db_name"]), text(&row["type"])))
            .collect()
    }

    /// Returns `last_seq`.
    pub fn last_seq(&self) -> String {
        self.json()["last_seq"].as_str().unwrap().to_owned()
    }
}

impl Connection {
    /// Opens a connection to `address`.
    pub async fn open(address: SocketAddr) -> Self {
        Self::over(TcpStream::connect(address).await.unwrap())
    }

    /// Makes a connection over `socket`.
    pub fn over(socket: TcpStream) -> Self {
        Self { socket, received: Vec::new() }
    }

    /// Opens a connection and requests `target`.
    pub async fn get(address: SocketAddr, target: &str) -> Self {
        let mut connection = Self::open(address).await;
        connection.send(&format!("GET {target} HTTP/1.1\r\nHost: localhost\r\n\r\n")).await;
        connection
    }

    /// Sends `text` unchanged.
    pub async fn send(&mut self, text: &str) {
        self.socket.write_all(text.as_bytes()).await.unwrap();
    }

    /// Receives more bytes; returns false at the end of the connection.
    pub async fn receive(&mut self) -> bool {
        let read = timeout(LIMIT, self.socket.read_buf(&mut self.received)).await;
        read.expect("something has to come").is_ok_and(|bytes| bytes > 0)
    }

    /// Receives and returns the bytes up to and including `mark`; returns `None` if the connection ends first.
    async fn until(&mut self, mark: &[u8]) -> Option<Vec<u8>> {
        loop {
            if let Some(place) = self.received.windows(mark.len()).position(|window| window == mark) {
                let rest = self.received.split_off(place + mark.len());
                return Some(std::mem::replace(&mut self.received, rest));
            }
            if !self.receive().await {
                return None;
            }
        }
    }

    /// Receives the status and the headers.
    pub async fn head(&mut self) -> Head {
        let head = self.until(b"\r\n\r\n").await.expect("the head comes");
        let head = String::from_utf8(head).unwrap();
        let mut lines = head.trim_end().split("\r\n");
        let status = lines.next().unwrap().split(' ').nth(1).unwrap().parse().unwrap();
        let header = |line: &str| {
            let (name, value) = line.split_once(':').unwrap();
            (name.to_ascii_lowercase(), value.trim().to_owned())
        };
        Head { status, headers: lines.map(header).collect() }
    }

    /// Receives the next chunk of a chunked body; returns `None` after the last one. Fails the test if the body is cut off.
    pub async fn chunk(&mut self) -> Option<String> {
        self.try_chunk().await.expect("the body is not cut off")
    }

    /// Receives the next chunk of a chunked body; returns `Some(None)` after the last one, and `None` if the body is cut off.
    pub async fn try_chunk(&mut self) -> Option<Option<String>> {
        let size = self.until(b"\r\n").await?;
        let size = usize::from_str_radix(std::str::from_utf8(&size).unwrap().trim(), 16).unwrap();
        while self.received.len() < size + 2 {
            if !self.receive().await {
                return None;
            }
        }
        let rest = self.received.split_off(size + 2);
        let mut chunk = std::mem::replace(&mut self.received, rest);
        chunk.truncate(size);
        Some((size > 0).then(|| String::from_utf8(chunk).unwrap()))
    }

    /// Receives all remaining chunks as one text.
    pub async fn rest(&mut self) -> String {
        let mut rest = String::new();
        while let Some(chunk) = self.chunk().await {
            rest.push_str(&chunk);
        }
        rest
    }

    /// Returns everything that arrives until the connection ends.
    pub async fn everything(&mut self) -> String {
        while self.receive().await {}
        String::from_utf8_lossy(&self.received).into_owned()
    }

    /// Receives the whole answer.
    pub async fn answer(&mut self) -> Answer {
        let head = self.head().await;
        let body = if head.headers.contains_key("transfer-encoding") {
            self.rest().await
        } else {
            let length = head.headers.get("content-length").map_or(0, |length| length.parse().unwrap());
            while self.received.len() < length {
                assert!(self.receive().await, "the body is not cut off");
            }
            let rest = self.received.split_off(length);
            String::from_utf8(std::mem::replace(&mut self.received, rest)).unwrap()
        };
        Answer { head, body }
    }
}

/// Sends a request without a body, and returns the answer.
pub async fn get(address: SocketAddr, target: &str) -> Answer {
    Connection::get(address, target).await.answer().await
}

/// Sends a request with headers and a body, and returns the answer.
pub async fn ask(address: SocketAddr, method: &str, target: &str, headers: &str, body: &str) -> Answer {
    let mut connection = Connection::open(address).await;
    let length = body.len();
    let request = format!(
        "{method} {target} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n{headers}\r\n{body}"
    );
    connection.send(&request).await;
    if method == "HEAD" {
        return Answer { head: connection.head().await, body: String::new() };
    }
    connection.answer().await
}
