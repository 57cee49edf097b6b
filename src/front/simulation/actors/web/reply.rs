//! [`Reply`]: parses the answer to a request for a feed, byte by byte, as strictly as a client can that knows its
//! form.

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FeedFormat {
    /// One JSON object, a row a line (`normal`, `longpoll`).
    Array,
    /// A JSON object a line (`continuous`).
    Lines,
    /// Server-sent events (`eventsource`).
    Events,
}

/// A part of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Piece {
    /// The head, with its status.
    Head(u16),
    Row(String),
    /// The position of the feed: in a heartbeat, or at its end.
    Seq(String),
    /// The body of an answer that is no feed.
    Refusal(String),
    End,
}

/// The next part of the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    Head,
    Size,
    Chunk(usize),
    /// So many bytes of a body of known length.
    Rest(usize),
    Nothing,
}

/// An answer while it arrives.
pub(super) struct Reply {
    form: FeedFormat,
    /// Whether heartbeats were asked for.
    has_heartbeat: bool,
    /// Received bytes that are not parsed yet.
    received: Vec<u8>,
    next: Next,
    /// Bytes of the body that are not parsed yet.
    body: Vec<u8>,
    status: u16,
    /// Whether the feed has sent its final position.
    has_ended: bool,
}

impl Reply {
    pub fn new(form: FeedFormat, has_heartbeat: bool) -> Self {
        let (received, body) = (Vec::new(), Vec::new());
        Self { form, has_heartbeat, received, next: Next::Head, body, status: 0, has_ended: false }
    }

    /// Parses received bytes. Fails if they do not have the form.
    pub fn take(&mut self, bytes: &[u8]) -> Result<Vec<Piece>, String> {
        self.received.extend_from_slice(bytes);
        let mut pieces = Vec::new();
        while self.step(&mut pieces)? {}
        Ok(pieces)
    }

    /// Parses the next part, if it is complete.
    fn step(&mut self, pieces: &mut Vec<Piece>) -> Result<bool, String> {
        match self.next {
            Next::Head => {
                let Some(head) = self.until(b"\r\n\r\n")? else { return Ok(false) };
                self.take_head(&head)?;
                pieces.push(Piece::Head(self.status));
            }
            Next::Size => {
                let Some(line) = self.until(b"\r\n")? else { return Ok(false) };
                let size = usize::from_str_radix(&line, 16).map_err(|_| format!("{line:?} is no size"))?;
                self.next = Next::Chunk(size);
            }
            Next::Chunk(size) => {
                if self.received.len() < size + 2 {
                    return Ok(false);
                }
                let chunk: Vec<_> = self.received.drain(..size + 2).collect();
                if !chunk.ends_with(b"\r\n") {
                    return Err("a chunk is longer than it says".to_owned());
                }
                self.next = if size == 0 { Next::Nothing } else { Next::Size };
                self.body.extend_from_slice(&chunk[..size]);
                self.take_body(size == 0, pieces)?;
            }
            Next::Rest(size) => {
                if self.received.len() < size {
                    return Ok(false);
                }
                self.body = self.received.drain(..size).collect();
                self.next = Next::Nothing;
                self.take_body(true, pieces)?;
            }
            Next::Nothing if self.received.is_empty() => return Ok(false),
            Next::Nothing => return Err(format!("{:?} comes after the end", self.received)),
        }
        Ok(true)
    }

    /// The received text up to `mark`.
    fn until(&mut self, mark: &[u8]) -> Result<Option<String>, String> {
        let Some(at) = self.received.windows(mark.len()).position(|window| window == mark) else {
            return Ok(None);
        };
        let mut text: Vec<_> = self.received.drain(..at + mark.len()).collect();
        text.truncate(at);
        String::from_utf8(text).map(Some).map_err(|error| error.to_string())
    }

    fn take_head(&mut self, head: &str) -> Result<(), String> {
        let mut lines = head.split("\r\n");
        let status = lines.next().and_then(|line| line.strip_prefix("HTTP/1.1 ")?.get(..3)?.parse().ok());
        self.status = status.ok_or_else(|| format!("{head:?} has no status"))?;
        let header = |name: &str| {
            let mut lines = head.split("\r\n").filter_map(|line| line.split_once(": "));
            lines.find(|(of, _)| of.eq_ignore_ascii_case(name)).map(|(_, value)| value.to_owned())
        };
        let kind = header("content-type").unwrap_or_default();
        let expected = match self.form {
            FeedFormat::Events if self.status == 200 => "text/event-stream",
            _ => "application/json",
        };
        if kind != expected {
            return Err(format!("an answer of status {} is {kind:?}", self.status));
        }
        self.next = match header("content-length").map(|length| length.parse()) {
            Some(Ok(length)) => Next::Rest(length),
            None if header("transfer-encoding").as_deref() == Some("chunked") => Next::Size,
            _ => return Err(format!("{head:?} does not say how long it is")),
        };
        Ok(())
    }

    /// Parses the complete parts of the body.
    fn take_body(&mut self, is_end: bool, pieces: &mut Vec<Piece>) -> Result<(), String> {
        if self.status == 200 {
            match self.form {
                FeedFormat::Array if is_end => self.take_array(pieces)?,
                FeedFormat::Array => {}
                FeedFormat::Lines => self.take_lines(is_end, pieces)?,
                FeedFormat::Events => self.take_events(is_end, pieces)?,
            }
        } else if is_end {
            let text = String::from_utf8(std::mem::take(&mut self.body));
            pieces.push(Piece::Refusal(text.map_err(|error| error.to_string())?));
        }
        if is_end {
            pieces.push(Piece::End);
        }
        Ok(())
    }

    /// Parses an object of all rows.
    fn take_array(&mut self, pieces: &mut Vec<Piece>) -> Result<(), String> {
        let body = String::from_utf8(std::mem::take(&mut self.body)).map_err(|error| error.to_string())?;
        let parsed: serde_json::Value =
            serde_json::from_str(&body).map_err(|error| format!("{error}: {body:?}"))?;
        let last = parsed["last_seq"].as_str().ok_or_else(|| format!("{body:?} has no end"))?;
        let inner = body.strip_prefix("{\"results\":[\n");
        let inner = inner.and_then(|inner| Some(inner.rsplit_once("\n],\n")?.0));
        let inner = inner.ok_or_else(|| format!("{body:?} is no feed"))?;
        let rows = parsed["results"].as_array().ok_or_else(|| format!("{body:?} has no rows"))?;
        let texts: Vec<_> = inner.split(",\r\n").map(|row| row.trim_matches('\n').to_owned()).collect();
        let texts = if rows.is_empty() { &texts[1..] } else { &texts[..] };
        if texts.len() != rows.len() || !self.has_heartbeat && inner != texts.join(",\r\n") {
            return Err(format!("{body:?} has not the form of a feed"));
        }
        pieces.extend(texts.iter().cloned().map(Piece::Row));
        pieces.push(Piece::Seq(last.to_owned()));
        Ok(())
    }

    /// Parses an object a line.
    fn take_lines(&mut self, is_end: bool, pieces: &mut Vec<Piece>) -> Result<(), String> {
        while let Some(line) = self.part(b"\n")? {
            if self.has_ended {
                return Err(format!("{line:?} comes after the end"));
            }
            if line.is_empty() {
                if !self.has_heartbeat {
                    return Err("a heartbeat that was not asked for".to_owned());
                }
            } else if let Some(rest) = line.strip_prefix("{\"last_seq\":\"") {
                self.has_ended = true;
                pieces.push(Piece::Seq(rest.split('"').next().unwrap_or_default().to_owned()));
            } else {
                pieces.push(Piece::Row(line));
            }
        }
        if is_end && (!self.has_ended || !self.body.is_empty()) {
            return Err("a feed of lines ends without an end".to_owned());
        }
        Ok(())
    }

    /// Parses server-sent events.
    fn take_events(&mut self, is_end: bool, pieces: &mut Vec<Piece>) -> Result<(), String> {
        while let Some(event) = self.part(b"\n\n")? {
            let lines: Vec<_> = event.split('\n').collect();
            match lines[..] {
                ["event: heartbeat", "data: ", id] if self.has_heartbeat => {
                    let seq = id_of(id).ok_or_else(|| format!("{event:?} has no id"))?;
                    pieces.push(Piece::Seq(seq.to_owned()));
                }
                [data, id] => {
                    let row = data.strip_prefix("data: ").ok_or_else(|| format!("{event:?} has no data"))?;
                    let seq = id_of(id).ok_or_else(|| format!("{event:?} has no id"))?;
                    if !row.contains(&format!("\"seq\":\"{seq}\"")) {
                        return Err(format!("{event:?} has two positions"));
                    }
                    pieces.push(Piece::Row(row.to_owned()));
                }
                _ => return Err(format!("{event:?} is no event")),
            }
        }
        if is_end && !self.body.is_empty() {
            return Err("a feed of events ends within one".to_owned());
        }
        Ok(())
    }

    /// The text of the body up to `mark`.
    fn part(&mut self, mark: &[u8]) -> Result<Option<String>, String> {
        let Some(at) = self.body.windows(mark.len()).position(|window| window == mark) else {
            return Ok(None);
        };
        let mut text: Vec<_> = self.body.drain(..at + mark.len()).collect();
        text.truncate(at);
        String::from_utf8(text).map(Some).map_err(|error| error.to_string())
    }
}

/// The position in the line of an event's id, which is JSON.
fn id_of(line: &str) -> Option<&str> {
    line.strip_prefix("id: \"")?.strip_suffix('"')
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str =
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n";

    /// The pieces of `body`, sent in chunks of `size` bytes.
    fn pieces(form: FeedFormat, body: &str, size: usize) -> Result<Vec<Piece>, String> {
        let mut reply = Reply::new(form, false);
        let chunk = |bytes: &[u8]| format!("{:x}\r\n{}\r\n", bytes.len(), String::from_utf8_lossy(bytes));
        let chunks: String = body.as_bytes().chunks(size).map(chunk).collect();
        let text = format!("{HEAD}{chunks}0\r\n\r\n");
        let mut all = Vec::new();
        for byte in text.as_bytes() {
            all.extend(reply.take(&[*byte])?);
        }
        Ok(all)
    }

    #[test]
    fn rows_are_taken_out_of_any_chunks() {
        let row = |number: u32| format!("{{\"db_name\":\"a\",\"type\":\"created\",\"seq\":\"{number}\"}}");
        let array = format!("{{\"results\":[\n{},\r\n{}\n],\n\"last_seq\":\"2\"}}\n", row(1), row(2));
        let lines = format!("{}\n{}\n{{\"last_seq\":\"2\"}}\n", row(1), row(2));
        let expected = [
            Piece::Head(200),
            Piece::Row(row(1)),
            Piece::Row(row(2)),
            Piece::Seq("2".to_owned()),
            Piece::End,
        ];
        for size in 1..9 {
            assert_eq!(pieces(FeedFormat::Array, &array, size).unwrap(), expected);
            assert_eq!(pieces(FeedFormat::Lines, &lines, size).unwrap(), expected);
        }
    }

    #[test]
    fn what_does_not_look_as_it_has_to_is_refused() {
        for (form, body) in [
            (FeedFormat::Array, "{\"results\":[\n\n]}\n"),
            (FeedFormat::Array, "{\"results\":[{},{}\n],\n\"last_seq\":\"2\"}\n"),
            (FeedFormat::Lines, "{}\n"),
            (FeedFormat::Lines, "\n{\"last_seq\":\"2\"}\n"),
            (FeedFormat::Lines, "{\"last_seq\":\"2\"}\n{}\n"),
        ] {
            assert!(pieces(form, body, 100).is_err(), "{body:?}");
        }
    }
}
